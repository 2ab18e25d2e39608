"""The server with many clients: shared prompts, metrics, health and shutdown."""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import threading

import openai
import pytest

from kvq_models.inference.sampling import Sampling
from tests.kvq_tools.serving.engine_answers import alone, text_of
from tests.kvq_tools.serving.running import (
    NAME,
    PROMPT,
    QUEUE,
    SLOTS,
    Running,
    running,
)


def test_many_clients_at_once_get_what_each_gets_alone(server: Running):
    prompts = [PROMPT[: 5 + 3 * i] for i in range(QUEUE)]
    asked = [
        dict(prompt=prompt, max_tokens=10 + 2 * i, temperature=(i % 3) * 0.5, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    expected = [
        text_of(
            server,
            one["prompt"],
            alone(
                server,
                one["prompt"],
                one["max_tokens"],
                sampling=Sampling(one["temperature"]),
                seed=one["seed"],
            ),
        )
        for one in asked
    ]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        with server.client as own:
            found[i] = own.completions.create(model=NAME, **asked[i]).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(asked))] == expected


def metric_of(server: Running, name: str) -> float:
    return float(
        re.findall(
            rf"^{re.escape(name)} (\S+)$", server.raw("GET", "/metrics")[2].decode(), re.MULTILINE
        )[0]
    )


def test_choices_and_conversations_share_what_was_read(server: Running, client: openai.OpenAI):
    names = (
        "kvq_prefix_lookups_total",
        "kvq_prefix_hits_total",
        "kvq_prefix_tokens_total",
        "kvq_prompt_tokens_total",
    )
    ids = [7, *range(100, 170)]  # a chunk of 64, and 7 more

    def counted(prompt: list[int], n: int) -> tuple[float, ...]:
        before = [metric_of(server, name) for name in names]
        client.completions.create(model=NAME, prompt=prompt, max_tokens=2, n=n)
        return tuple(metric_of(server, name) - was for name, was in zip(names, before, strict=True))

    assert counted(ids, 3) == (3, 2, 2 * 71, 71)
    assert counted([*ids, 5, 6], 1) == (1, 1, 64, 9)
    assert (
        0
        < metric_of(server, "kvq_prefix_bytes")
        <= metric_of(server, "kvq_prefix_limit_bytes")
        == 64 << 20
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


def test_requests_that_were_accepted_end_after_the_server_was_told_to(shallow: pathlib.Path):
    with running(shallow) as server, server.client as own:
        asked = dict(model=NAME, prompt=PROMPT, max_tokens=150, temperature=0)
        whole = own.completions.create(**asked).choices[0].text
        stream = own.completions.create(**asked, stream=True)
        text = next(stream).choices[0].text
        server.server.should_exit = True
        for chunk in stream:
            text += chunk.choices[0].text
        assert text == whole
        with pytest.raises(OSError, match="refused"):
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=5).connect()
