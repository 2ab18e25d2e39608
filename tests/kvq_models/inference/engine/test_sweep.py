"""An engine that verifies its memory gives the right answer although bits flip in it."""

import dataclasses

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Ended, Event, Request, Token
from kvq_models.inference.engine.sweep import Sweep
from kvq_models.inference.sampling import Sampling
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.inference.engine.test_engine import answer, drained, engine_of

PROMPT = tuple(range(5, 65))  # blocks of the body, and more than one chunk
ASKED = Request(PROMPT, 24, Sampling(0.9), seed=3, frequency_penalty=0.2)


@pytest.fixture(scope="module")
def llama() -> Llama:
    return random_llama(tiny_config(num_hidden_layers=2))


@pytest.fixture
def engine(llama: Llama) -> Engine:
    engine = engine_of(llama, verify=True, prefixes=PrefixStore(1 << 22))
    engine._sweep = Sweep(each=2, share=1.0)  # every layer at every step
    return engine


def flip(cache: kvq.cache.Cache, field: str, row: int) -> kvq.cache.Cache:
    """Return the cache with a flipped bit in the first token of the last layer's window or body,
    or in its length."""

    def damaged(leaf: jax.Array, part: int) -> jax.Array:
        array = np.array(leaf)
        array.view(f"uint{8 * array.dtype.itemsize}")[(row, *(0,) * (array.ndim - 2), part)] ^= 4
        return jax.device_put(array, leaf.sharding)

    if field == "lengths":
        return dataclasses.replace(cache, lengths=jax.device_put(cache.lengths.at[row].add(-3)))
    sides = list(getattr(cache.layers[-1], field))
    sides[-1] = jax.tree.map(lambda leaf: damaged(leaf, 0), sides[-1])
    layer = dataclasses.replace(cache.layers[-1], **{field: tuple(sides)})
    return dataclasses.replace(cache, layers=(*cache.layers[:-1], layer))


def texts(events: list[Event]) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault(event.ticket, []).append((event.token, event.logprob))
    return found


@pytest.mark.parametrize("field", ["body", "ring", "lengths"])
def test_a_flipped_bit_changes_no_answer(engine: Engine, llama: Llama, field: str):
    other = Request((7, 8), 24)
    alone = [answer(engine_of(llama), request) for request in (ASKED, other)]
    tickets = [engine.submit(ASKED), engine.submit(other)]
    events = [event for _ in range(10) for event in engine.advance()]
    slot = next(i for i, one in enumerate(engine._slots) if one and one.ticket == tickets[0])
    assert 0 < len(texts(events)[tickets[0]]) < 20
    engine.cache = flip(engine.cache, field, slot)
    events += drained(engine)
    assert engine.counts.damaged == 1
    for ticket, expected in zip(tickets, alone, strict=True):
        tokens = [event[1:3] for event in expected if event[0] == "Token"]
        assert texts(events)[ticket] == tokens, "the damage is in the answer"
        assert [event.reason for event in events if event == Ended(ticket, "length")] == ["length"]


def test_a_row_that_is_damaged_between_its_chunks_is_read_again(engine: Engine, llama: Llama):
    expected = answer(engine_of(llama), ASKED)
    ticket = engine.submit(ASKED)
    engine.advance()  # the first of two chunks
    assert engine._reading is not None
    engine._sweep.row_damaged(engine._row, engine._reading[1])
    engine._row = flip(engine._row, "ring", 0)
    events = drained(engine)
    assert engine.counts.damaged == 1
    tokens = [event[1:3] for event in expected if event[0] == "Token"]
    assert texts(events)[ticket] == tokens


def with_stuck_bit(engine: Engine, slot: int, calls: int = 200) -> list[Event]:
    """Return the events of an engine that runs while a bit of a slot flips after every call."""
    events: list[Event] = []
    for _ in range(calls):
        if engine.idle:
            return events
        events += engine.advance()
        engine.cache = flip(engine.cache, "ring", slot)
    pytest.fail(f"the engine is still at work after {calls} calls")


def test_a_request_whose_memory_is_damaged_at_every_attempt_ends_and_makes_room(llama: Llama):
    engine = engine_of(llama, slots=1, verify=True)
    engine._sweep = Sweep(each=2, share=1.0)
    ticket = engine.submit(ASKED)
    events = with_stuck_bit(engine, 0)
    assert events[-1] == Ended(ticket, "damaged")
    assert engine.counts.damaged == 3
    assert answer(engine, ASKED) == answer(engine_of(llama, slots=1), ASKED)


def test_a_row_whose_memory_is_damaged_at_every_attempt_ends_its_request(llama: Llama):
    engine = engine_of(llama, verify=True)  # without prefixes, which would be used again
    ticket, events = engine.submit(ASKED), []
    for _ in range(3):
        events += engine.advance()  # the first of two chunks
        engine._row = flip(engine._row, "ring", 0)
    events += engine.advance()
    assert events == [Ended(ticket, "damaged")]
    assert engine.idle


def test_a_damaged_request_begins_again_in_another_slot(engine: Engine, llama: Llama):
    expected = [event[1:3] for event in answer(engine_of(llama), ASKED) if event[0] == "Token"]
    ticket = engine.submit(ASKED)
    events = with_stuck_bit(engine, 0)
    assert events[-1] == Ended(ticket, "length")
    assert texts(events)[ticket] == expected
    assert engine.counts.damaged == 1


def test_an_answer_that_was_sent_from_damaged_memory_ends_with_an_error(engine: Engine):
    ticket = engine.submit(ASKED)
    for _ in range(6):
        engine.advance()
    (accepted,) = [one for one in engine._slots if one]
    accepted.tokens[-1] ^= 1  # as if damage had been drawn before it was found
    slot = engine._slots.index(accepted)
    engine.cache = flip(engine.cache, "ring", slot)
    assert Ended(ticket, "damaged") in drained(engine)


def test_a_sweep_takes_its_share_of_the_time(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    clock, sums = [0.0], []

    def slow(cache: kvq.cache.Cache, layers: list[int]) -> dict:
        clock[0] += 0.5
        sums.append(layers)
        return kvq.files.seal(cache, layers)

    monkeypatch.setattr("kvq_models.inference.engine.sweep.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("kvq_models.inference.engine.sweep.seal", slow)
    sweep = Sweep(share=0.1)
    for _ in range(1000):
        sweep.damaged(engine.cache, engine._slots)
        clock[0] += 0.05
    assert clock[0] * 0.08 < 0.5 * len(sums) < clock[0] * 0.12


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("field", ["body", "ring"])
def test_a_flip_that_no_turn_has_met_is_found_before_its_answer_ends(
    engine: Engine, llama: Llama, field: str, strict: bool
):
    asked = dataclasses.replace(ASKED, max_new_tokens=3, logprobs=strict)
    expected = [event[1:3] for event in answer(engine_of(llama), asked) if event[0] == "Token"]
    engine._sweep = Sweep(share=1e-9)  # one turn at the beginning
    ticket = engine.submit(asked)
    events = list(engine.advance())
    while not any(engine._slots):
        events += engine.advance()
    engine.cache = flip(engine.cache, field, next(i for i, one in enumerate(engine._slots) if one))
    events += drained(engine)
    assert engine.counts.damaged == 1
    found, sent = texts(events)[ticket], events[-1].reason == "length"
    if strict:  # what was sent is right, or the answer ends with an error
        assert (found == expected) == sent
    else:
        assert ([token for token, _ in found] == [token for token, _ in expected]) == sent
    assert answer(engine, asked) == answer(engine_of(llama), asked)


def test_a_row_that_was_damaged_while_it_was_empty_is_replaced(engine: Engine, llama: Llama):
    expected = answer(engine_of(llama), ASKED)
    engine._sweep.compile(engine.cache, engine._row)
    engine._row = flip(engine._row, "ring", 0)
    assert answer(engine, ASKED) == expected
    assert engine.counts.damaged == 1


def test_after_a_failed_warm_up_another_one_keeps_prefixes_and_verification(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    def no_room(*args) -> None:
        raise RuntimeError("no room for a program")

    with monkeypatch.context() as patched:
        patched.setattr("kvq_models.inference.engine.engine.compile_at_once", no_room)
        with pytest.raises(RuntimeError, match="no room"):
            engine.warm_up()
    engine.warm_up()
    expected = answer(engine, ASKED)
    assert answer(engine, ASKED) == expected
    assert engine.counts.prefix_hits == 1, "prompts are no longer kept"
    engine._row = flip(engine._row, "ring", 0)
    assert answer(engine, ASKED) == expected
    assert engine.counts.damaged == 1, "memory is no longer verified"
