"""Metrics for Prometheus. Counters are the engine's, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import Reason
from kvq_tools.serving.worker import Worker

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics registry of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "kvq_time_to_first_token_seconds",
            "From acceptance to an answer's first token, the wait in the queue included",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.responses = Counter(
            "kvq_responses",
            "Responses by path and status",
            ["path", "status"],
            registry=self.registry,
        )

    def watch(self, worker: Worker) -> None:
        self.registry.register(_EngineCollector(worker))


class _EngineCollector:
    def __init__(self, worker: Worker):
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        engine = self._worker.engine
        cache = {"spec": str(engine.cache.spec), "dtype": engine.cache.dtype}
        yield InfoMetricFamily("kvq_cache", "The cache", cache)
        for name, text, value in _gauges(self._worker):
            yield GaugeMetricFamily(name, text, value)
        for name, text, value in _counters(engine):
            yield CounterMetricFamily(name, text, value)
        ended = CounterMetricFamily(
            "kvq_requests_ended", "Requests that ended, by reason", labels=["reason"]
        )
        for reason in get_args(Reason):
            ended.add_metric([reason], self._worker.ended[reason])
        yield ended


def _gauges(worker: Worker) -> list[tuple[str, str, int]]:
    """Return (name, description, value) of what is now."""
    engine, prefixes = worker.engine, worker.engine.prefixes
    kept, limit = (prefixes.nbytes, prefixes.limit) if prefixes else (0, 0)
    on_disk = prefixes.folder.nbytes if prefixes and prefixes.folder else 0
    tokens = engine.slots * engine.capacity
    return [
        ("kvq_queue_requests", "Accepted requests that wait for a slot", worker.waiting),
        ("kvq_queue_limit", "Requests that may wait", engine.queue_limit),
        ("kvq_slots", "Requests that can be served at a time", engine.slots),
        ("kvq_slots_busy", "Slots that are taken", engine.busy),
        ("kvq_cache_bytes", "Bytes of the caches, whatever they hold", engine.nbytes),
        ("kvq_cache_capacity_tokens", "Tokens that all slots can hold", tokens),
        ("kvq_cache_live_tokens", "Tokens that the slots hold for requests", engine.live_tokens()),
        ("kvq_prefix_bytes", "Bytes of prefixes, in the host's memory", kept),
        ("kvq_prefix_disk_bytes", "Bytes of prefixes on disk", on_disk),
        ("kvq_prefix_limit_bytes", "Bytes that prefixes may take", limit),
    ]


def _counters(engine: Engine) -> list[tuple[str, str, int]]:
    """Return (name, description, value) of what the engine has done so far."""
    counts = engine.counts
    reads = engine.prefixes.reads if engine.prefixes else 0
    rate = "Tokens that were drawn: their rate is tokens per second"
    damaged = "How often the memory of a request was damaged"
    lookups = "Prompts that were looked up among the prefixes"
    hits = "Prompts of which at least the first chunk was there"
    spared = "Prompt tokens that were not read because they were there"
    return [
        ("kvq_prompt_tokens", "Prompt tokens that were read", counts.prompt_tokens),
        ("kvq_new_tokens", rate, counts.new_tokens),
        ("kvq_steps", "Steps of all slots", counts.steps),
        ("kvq_prefill_chunks", "Chunks of prompts", counts.chunks),
        ("kvq_damaged", damaged, counts.damaged),
        ("kvq_prefix_lookups", lookups, counts.prefix_lookups),
        ("kvq_prefix_hits", hits, counts.prefix_hits),
        ("kvq_prefix_tokens", spared, counts.prefix_tokens),
        ("kvq_prefix_disk_reads", "Chunks of prompts that came from the disk", reads),
    ]
