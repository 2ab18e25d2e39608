"""Slots on a mesh: requests that come and go get the tokens of one device, from programs that are
compiled once."""

from collections import defaultdict

import jax
import numpy as np
import pytest

from kvq_jax.placement.allowed import parse
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Ended, Request, Token
from tests.multi_device.tiny_model import CAPACITY, SPEC, model

MESH = "heads=2,tokens=2"


def engine_of(mesh: str, **options) -> Engine:
    sizes = {"slots": 2, "capacity": CAPACITY, "widths": (16, 48), "dtype": "float32"}
    placement = parse(mesh) if mesh else None
    return Engine(model(mesh), SPEC, **sizes, placement=placement, **options)


def answers(engine: Engine) -> list[list[int]]:
    """Return the tokens of requests of one chunk and of two, more than there are slots, of which
    one is given up while it is read."""
    rng, found = np.random.default_rng(1), defaultdict(list)
    tickets = [
        engine.submit(Request(tuple(rng.integers(3, 90, size).tolist()), 12))
        for size in (9, 70, 60, 30, 16)
    ]
    given_up = engine.submit(Request(tuple(rng.integers(3, 90, 90).tolist()), 12))
    ended = []
    while not engine.idle:
        for event in engine.advance():
            if isinstance(event, Token):
                found[event.ticket].append(event.token)
            elif isinstance(event, Ended):
                ended.append((event.ticket, event.reason))
        if len(ended) == 4:
            engine.cancel(given_up)
    assert (given_up, "cancelled") in ended
    return [found[ticket] for ticket in tickets]


def test_slots_on_a_mesh_give_the_tokens_of_one_device_and_compile_once(caplog):
    engine = engine_of(MESH)
    engine.warm_up()
    with jax.log_compiles():
        found = answers(engine)
        assert "Finished XLA compilation" not in caplog.text
        assert found == answers(engine_of(""))
        assert "Finished XLA compilation" in caplog.text, (
            "an engine without a warm-up compiles nothing"
        )
    assert all(len(tokens) == 12 for tokens in found)
    assert len({token for tokens in found for token in tokens}) > 4, "one token over and over"


def test_rows_are_not_split_and_prefixes_not_kept():
    with pytest.raises(
        ValueError, match=r"split heads and tokens and keep no prefixes: got rows=2$"
    ):
        engine_of("rows=2")
    with pytest.raises(ValueError, match="got heads=2,tokens=2 and a store of prefixes"):
        engine_of(MESH, prefixes=PrefixStore(1 << 20))
