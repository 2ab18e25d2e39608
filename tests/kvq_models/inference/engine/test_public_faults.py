"""Faults that public engines were reported to have: none of them changes an answer here."""

from __future__ import annotations

import random

import pytest

from kvq_models import Llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Request, Token
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.inference.engine.test_engine import WIDTHS, answer, engine_of

CHUNK = WIDTHS[-1]
SHARED = tuple(range(3, 3 + CHUNK))


@pytest.fixture(scope="module")
def llama() -> Llama:
    return random_llama(tiny_config(num_hidden_layers=1))


def tokens(events: list[tuple]) -> list[tuple]:
    return [event[1:3] for event in events if event[0] == "Token"]


def right_answers(llama: Llama, requests: list[Request]) -> list[list[tuple]]:
    engine = engine_of(llama)  # without prefixes
    return [tokens(answer(engine, request)) for request in requests]


def test_requests_that_leave_and_pieces_that_go_change_no_other_answer(llama: Llama):
    """vLLM 38606: with full caches, evictions and cancelled requests, answers held what other
    requests had written. Here a store for two pieces, requests that begin alike, and some that
    leave at random."""
    rng = random.Random(0)
    requests = [
        Request((*SHARED[: rng.randint(1, CHUNK)], *range(40 + i, 50 + i))[:60], rng.randint(2, 20))
        for i in range(24)
    ]
    expected = right_answers(llama, requests)
    probe = engine_of(llama, prefixes=PrefixStore(1 << 24))
    answer(probe, requests[0])
    assert probe.prefixes is not None
    engine = engine_of(llama, prefixes=PrefixStore(2 * probe.prefixes.nbytes), queue_limit=50)
    leaving = {i: rng.randint(1, 12) for i in range(0, len(requests), 4)}
    found = answers(engine, requests, leaving)
    for i, right in enumerate(expected):
        got = found.get(i, [])
        assert got == right[: len(got)], f"request {i}"
        assert i in leaving or len(got) == len(right)
    wrong = [
        one for i, one in found.items() if one != expected[(i + 1) % len(expected)][: len(one)]
    ]
    assert wrong, "the answers of other requests are no different"


def answers(
    engine: Engine, requests: list[Request], leaving: dict[int, int]
) -> dict[int, list[tuple]]:
    """Return the tokens of each request. leaving: those that are cancelled after so many steps."""
    tickets = [engine.submit(request) for request in requests]
    found: dict[int, list[tuple]] = {i: [] for i in range(len(requests))}
    step = 0
    while not engine.idle:
        for i, when in leaving.items():
            if step == when:
                engine.cancel(tickets[i])
        for event in engine.advance():
            if isinstance(event, Token):
                found[tickets.index(event.ticket)].append((event.token, event.logprob))
        step += 1
    return found
