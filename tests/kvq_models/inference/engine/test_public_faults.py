"""Faults that public engines were reported to have: none of them changes an answer here."""

import random

from kvq_models import Llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Request, Token
from tests.kvq_models.inference.engine.test_engine import WIDTHS, answer, engine_of

CHUNK = WIDTHS[-1]
SHARED = tuple(range(3, 3 + CHUNK))


def tokens(events: list[tuple]) -> list[tuple]:
    return [event[1:3] for event in events if event[0] == "Token"]


def right_answers(llama: Llama, requests: list[Request]) -> list[list[tuple]]:
    engine = engine_of(llama)  # without prefixes
    return [tokens(answer(engine, request)) for request in requests]


def test_requests_that_leave_owners_that_alternate_and_pieces_that_go_change_no_answer(
    llama: Llama,
):
    """vLLM 38606: answers held what requests that were cancelled, or evicted from full caches, had
    written; and two requests with one long prefix were read in chunks while requests of two
    adapters came in turns, and blocks that were kept by adapter and prefix held others' tokens.
    Here prefixes are kept by owner and prefix, in a store for three pieces, and some requests
    leave at random."""
    rng = random.Random(0)
    anchors = [Request((*SHARED, *range(60, 70 + i)), 12, owner="a") for i in range(2)]
    thrash = [
        Request((*SHARED[: CHUNK - i % 3], 20 + i), 6, owner="ab"[i % 2], seed=i) for i in range(11)
    ]
    alike = [
        Request((*SHARED[: rng.randint(1, CHUNK)], *range(40 + i, 50 + i))[:60], rng.randint(2, 20))
        for i in range(8)
    ]
    requests = [anchors[0], *thrash, *alike, anchors[1]]
    expected = right_answers(llama, requests)
    engine = engine_of(llama, prefixes=room_for(llama, 3, anchors[0]), queue_limit=50)
    arriving = {i: i for i in range(len(requests))}
    cut = 0
    for _ in range(3):
        leaving = {i: i + rng.randint(1, 12) for i in range(2, len(requests) - 1, 4)}
        answered = answers(engine, requests, leaving, arriving)
        cut += sum(len(answered[i]) < requests[i].max_new_tokens for i in leaving)
        for i, right in enumerate(expected):
            assert answered[i] == right[: len(answered[i])], f"request {i}"
            assert i in leaving or len(answered[i]) == len(right)
    assert cut > 5, "nobody left before its answer was whole"
    assert engine.counts.prefix_hits, "no prefix was shared within an owner"
    assert_told_apart(answered, expected)


def room_for(llama: Llama, pieces: int, request: Request) -> PrefixStore:
    """Return a store that holds so many pieces like those of this request."""
    probe = engine_of(llama, prefixes=PrefixStore(1 << 24))
    answer(probe, request)
    assert probe.prefixes is not None
    return PrefixStore(pieces * probe.prefixes.nbytes)


def assert_told_apart(answered: dict[int, list[tuple]], expected: list[list[tuple]]):
    wrong = [
        one for i, one in answered.items() if one != expected[(i + 1) % len(expected)][: len(one)]
    ]
    assert wrong, "the answers of other requests are no different"


def answers(
    engine: Engine,
    requests: list[Request],
    leaving: dict[int, int],
    arriving: dict[int, int],
) -> dict[int, list[tuple]]:
    """Return the tokens of each request. leaving, arriving: the steps at which requests are
    cancelled and submitted."""
    tickets: dict[int, int] = {}
    answered: dict[int, list[tuple]] = {i: [] for i in range(len(requests))}
    step = 0
    while not engine.idle or len(tickets) < len(requests):
        for i, request in enumerate(requests):
            if arriving[i] == step:
                tickets[engine.submit(request)] = i
        for ticket, i in tickets.items():
            if leaving.get(i) == step:
                engine.cancel(ticket)
        for event in engine.advance():
            if isinstance(event, Token):
                answered[tickets[event.ticket]].append((event.token, event.logprob))
        step += 1
    return answered
