"""Faults that public engines were reported to have: none of them changes an answer here."""

import random

from kvq_models import Llama
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Request
from tests.kvq_models.inference.engine.test_engine import WIDTHS, answer, engine_of, traffic

CHUNK = WIDTHS[-1]
SHARED = tuple(range(3, 3 + CHUNK))


def test_requests_that_leave_owners_that_alternate_and_pieces_that_go_change_no_answer(
    llama: Llama,
):
    """vLLM 38606: answers held what requests that were cancelled, or evicted from full caches, had
    written; and two requests with one long prefix were read in chunks while requests of two
    adapters came in turns, and blocks that were kept by adapter and prefix held others' tokens.
    Here prefixes are kept by owner and prefix, in a store for three pieces, and requests that are
    cancelled come between the others."""
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
    plain = engine_of(llama)  # without prefixes
    alone = {i: answer(plain, request) for i, request in enumerate(requests)}
    engine = engine_of(llama, prefixes=room_for(llama, 3, anchors[0]), queue_limit=50)
    cancelled = 0
    for seed in range(3):
        crowd = traffic(engine, requests, seed, lambda engine: None)
        cancelled += crowd.pop(-1).count(("Ended", "cancelled"))
        assert crowd == alone, f"{seed=}"
    assert cancelled > 5, "nobody left before its answer was whole"
    assert engine.counts.prefix_hits, "no prefix was shared within an owner"
    assert len(set(map(tuple, alone.values()))) > 10, "the answers of requests are no different"


def room_for(llama: Llama, pieces: int, request: Request) -> PrefixStore:
    """Return a store that holds so many pieces like those of this request."""
    probe = engine_of(llama, prefixes=PrefixStore(1 << 24))
    answer(probe, request)
    assert probe.prefixes is not None
    return PrefixStore(pieces * probe.prefixes.nbytes)
