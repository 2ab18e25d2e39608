"""Metrics for Prometheus. Counters are the engine's, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from kvq_models.inference.engine.accepted import Counts
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
        self.registry.register(_OfEngine(worker))


class _OfEngine:
    def __init__(self, worker: Worker):
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        engine = self._worker.engine
        yield from _slots(self._worker)
        yield from _cache(engine)
        yield from _work(engine.counts)
        yield from _prefixes(engine)


def _slots(worker: Worker) -> Iterator[Metric]:
    engine: Engine = worker.engine
    yield GaugeMetricFamily(
        "kvq_queue_requests", "Accepted requests that wait for a slot", worker.waiting
    )
    yield GaugeMetricFamily("kvq_queue_limit", "Requests that may wait", engine.queue_limit)
    yield GaugeMetricFamily("kvq_slots", "Requests that can be served at a time", engine.slots)
    yield GaugeMetricFamily("kvq_slots_busy", "Slots that are taken", engine.busy)


def _cache(engine: Engine) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "kvq_cache", "The cache", {"spec": str(engine.cache.spec), "dtype": engine.cache.dtype}
    )
    yield GaugeMetricFamily(
        "kvq_cache_bytes", "Bytes of the caches, whatever they hold", engine.nbytes
    )
    yield GaugeMetricFamily(
        "kvq_cache_capacity_tokens",
        "Tokens that all slots can hold",
        engine.slots * engine.capacity,
    )
    yield GaugeMetricFamily(
        "kvq_cache_live_tokens", "Tokens that the slots hold for requests", engine.live_tokens()
    )


def _work(counts: Counts) -> Iterator[Metric]:
    """Yield what the engine has done so far."""
    yield CounterMetricFamily(
        "kvq_prompt_tokens", "Prompt tokens that were read", counts.prompt_tokens
    )
    yield CounterMetricFamily(
        "kvq_new_tokens",
        "Tokens that were drawn: their rate is tokens per second",
        counts.new_tokens,
    )
    yield CounterMetricFamily("kvq_steps", "Steps of all slots", counts.steps)
    yield CounterMetricFamily("kvq_prefill_chunks", "Chunks of prompts", counts.chunks)
    yield CounterMetricFamily(
        "kvq_damaged",
        "Requests whose memory was damaged, and which were computed again",
        counts.damaged,
    )
    ended = CounterMetricFamily(
        "kvq_requests_ended", "Requests that ended, by reason", labels=["reason"]
    )
    for reason in get_args(Reason):
        ended.add_metric([reason], counts.ended.get(reason, 0))
    yield ended


def _prefixes(engine: Engine) -> Iterator[Metric]:
    counts = engine.counts
    yield CounterMetricFamily(
        "kvq_prefix_lookups",
        "Prompts that were looked up among the prefixes",
        counts.prefix_lookups,
    )
    yield CounterMetricFamily(
        "kvq_prefix_hits",
        "Prompts of which at least the first chunk was there",
        counts.prefix_hits,
    )
    yield CounterMetricFamily(
        "kvq_prefix_tokens",
        "Prompt tokens that were not read because they were there",
        counts.prefix_tokens,
    )
    yield GaugeMetricFamily(
        "kvq_prefix_bytes",
        "Bytes of prefixes, in the host's memory",
        engine.prefixes.nbytes if engine.prefixes else 0,
    )
    folder = engine.prefixes.folder if engine.prefixes else None
    yield GaugeMetricFamily(
        "kvq_prefix_disk_bytes", "Bytes of prefixes on disk", folder.nbytes if folder else 0
    )
    reads = engine.prefixes.reads if engine.prefixes else 0
    yield CounterMetricFamily(
        "kvq_prefix_disk_reads", "Chunks of prompts that came from the disk", reads
    )
    yield GaugeMetricFamily(
        "kvq_prefix_limit_bytes",
        "Bytes that prefixes may take",
        engine.prefixes.limit if engine.prefixes else 0,
    )
