"""The server with many clients: shared prompts, metrics and health."""

from __future__ import annotations

import json
import re

import openai

from tests.kvq_tools.serving.running import (
    NAME,
    PROMPT,
    SLOTS,
    Running,
)


def metric_of(server: Running, name: str) -> float:
    return float(
        re.findall(
            rf"^{re.escape(name)} (\S+)$", server.raw("GET", "/metrics")[2].decode(), re.MULTILINE
        )[0]
    )


def test_metrics_and_health(server: Running, client: openai.OpenAI):
    def metric(name: str) -> float:
        return metric_of(server, name)

    before = (
        metric("kvq_new_tokens_total"),
        metric("kvq_time_to_first_token_seconds_count"),
        metric('kvq_requests_ended_total{reason="length"}'),
    )
    client.completions.create(model=NAME, prompt=PROMPT, max_tokens=7, temperature=0)
    after = (
        metric("kvq_new_tokens_total"),
        metric("kvq_time_to_first_token_seconds_count"),
        metric('kvq_requests_ended_total{reason="length"}'),
    )
    assert [b - a for a, b in zip(before, after, strict=True)] == [7, 1, 1]
    assert metric("kvq_cache_bytes") == server.service.worker.engine.nbytes
    server.until_idle()
    assert (metric("kvq_slots"), metric("kvq_slots_busy"), metric("kvq_cache_live_tokens")) == (
        SLOTS,
        0,
        0,
    )
    assert json.loads(server.raw("GET", "/health")[2]) == {
        "status": "ok",
        "slots": SLOTS,
        "busy": 0,
        "waiting": 0,
    }
