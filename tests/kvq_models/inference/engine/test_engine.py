"""The engine: whatever else is running, and whatever a slot held before, a request gets the tokens
that it gets alone, from the same programs."""

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Llama, forward, generate, prepare
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import (
    CapacityError,
    Ended,
    Event,
    PromptRead,
    QueueFullError,
    Request,
    Token,
)
from kvq_models.inference.sampling import Sampling

SPECS = ("kivi:bits=2,recent=8,block=32", "innerq:bits=2,recent=8,block=32")
SLOTS, CAPACITY, WIDTHS, VOCABULARY = 3, 96, (16, 48), 96


def engine_of(llama: Llama, spec: str = SPECS[0], **options) -> Engine:
    return Engine(
        prepare(llama, spec),
        spec,
        **({"slots": SLOTS, "capacity": CAPACITY, "widths": WIDTHS} | options),
    )


def some_requests(count: int = 12) -> list[Request]:
    """Prompts of one chunk and of two, greedy and sampled, with and without end tokens."""
    rng, found = np.random.default_rng(0), []
    for i in range(count):
        prompt = tuple(rng.integers(0, VOCABULARY, int(rng.integers(1, 70))).tolist())
        sampling = (Sampling(), Sampling(0.8), Sampling(1.2, top_k=9), Sampling(1.0, top_p=0.7))[
            i % 4
        ]
        ends = (3, 5, 8) if i % 3 == 0 else ()
        found.append(
            Request(
                prompt,
                int(rng.integers(1, 26)),
                sampling,
                seed=i,
                end_ids=ends,
                alternatives=2 * (i % 2),
            )
        )
    return found


def drained(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.advance()
    return events


def answer(engine: Engine, request: Request) -> list[tuple]:
    """Return the tokens that a request gets alone."""
    engine.submit(request)
    return [without_ticket(event) for event in drained(engine)]


def without_ticket(event: Event) -> tuple:
    """Return what was computed: all by which events compare but the ticket."""
    names = [field.name for field in dataclasses.fields(event) if field.compare]
    values = (getattr(event, name) for name in names if name != "ticket")
    return type(event).__name__, *values


@jax.jit
def poisoned(cache: kvq.cache.Cache, rows: jax.Array) -> kvq.cache.Cache:
    """NaN, or ones in every bit, wherever the rows that are marked have an array, but for their
    lengths."""

    def poison(spec: kvq.types.ArraySpec, array: jax.Array) -> jax.Array:
        bad = (
            jnp.nan
            if jnp.issubdtype(array.dtype, jnp.floating)
            else -1
            if jnp.issubdtype(array.dtype, jnp.signedinteger)
            else 255
        )
        return jnp.where(spec.along("batch", rows), jnp.asarray(bad, array.dtype), array)

    bad = jax.tree.map(poison, cache.axes, cache)
    return kvq.cache.Cache(
        bad.layers, cache.lengths, cache.spec, cache.dims, cache.capacity, cache.dtype
    )


def traffic(
    engine: Engine, requests: list[Request], seed: int, between: Callable[[Engine], None]
) -> dict[int, list[tuple]]:
    """Submit requests at random times in a random order, and cancel some of a second set half-way.
    Return the events of each of `requests`, and under -1 those of the second set."""
    rng = random.Random(seed)
    order = [(i, request, False) for i, request in enumerate(requests)]
    order += [(-1, request, True) for request in rng.sample(requests, len(requests) // 2)]
    rng.shuffle(order)
    owner: dict[int, int] = {}
    got: dict[int, list[tuple]] = {i: [] for i in range(-1, len(requests))}
    doomed: list[int] = []
    while order or not engine.idle:
        for _ in range(rng.randrange(3)):
            if order and engine.waiting < engine.queue_limit:
                i, request, vanishes = order.pop()
                owner[ticket := engine.submit(request)] = i
                doomed += [ticket] * vanishes
        if doomed and rng.random() < 0.3:
            engine.cancel(doomed.pop(rng.randrange(len(doomed))))
        for event in engine.advance():
            got[owner[event.ticket]].append(without_ticket(event))
        between(engine)
    return got


def poison_vacant(engine: Engine) -> None:
    vacant = np.array([held is None for held in engine._slots])
    engine.cache = poisoned(engine.cache, vacant)


# None: the native kernel, on a CPU
@pytest.mark.parametrize(("spec", "implementation"), [(SPECS[0], None), (SPECS[1], "xla")])
def test_a_request_gets_the_same_bits_alone_and_in_any_company_from_the_same_programs(
    llama: Llama, spec: str, implementation: str | None, compiled: list[str]
):
    engine, requests = engine_of(llama, spec, implementation=implementation), some_requests()
    engine.warm_up()
    poison_vacant(engine)
    programs = len(compiled)
    alone = {i: answer(engine, request) for i, request in enumerate(requests)}
    assert {events[-1][1] for events in alone.values()} == {"ended", "length"}
    cancelled = 0
    for seed in range(2):
        crowd = traffic(engine, requests, seed, poison_vacant)
        cancelled += crowd.pop(-1).count(("Ended", "cancelled"))
        assert crowd == alone, f"{seed=}"
    assert cancelled > 2
    assert len(compiled) == programs, (
        f"{len(compiled) - programs} programs were compiled after warm_up"
    )


def test_a_row_that_others_could_touch_would_be_noticed(llama: Llama):
    engine, requests = engine_of(llama), some_requests(6)
    alone = {i: answer(engine, request) for i, request in enumerate(requests)}

    def poison_a_neighbour(engine: Engine) -> None:
        taken = [slot for slot, held in enumerate(engine._slots) if held is not None]
        engine.cache = poisoned(engine.cache, np.arange(SLOTS) == (taken[-1] if taken else -1))

    crowd = traffic(engine, requests, 0, poison_a_neighbour)
    del crowd[-1]
    assert crowd != alone
    assert ("Ended", "not-finite") in [events[-1] for events in crowd.values()], (
        "nan goes unnoticed"
    )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, top_k=9)])
def test_tokens_are_those_of_generate(llama: Llama, sampling: Sampling):
    # of the same width in both
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, (1, 16), np.int32)
    cache = kvq.init_cache(SPECS[0], llama.config, 1, CAPACITY)
    out = generate(
        llama,
        cache,
        prompt,
        max_new_tokens=40,
        sampling=sampling,
        eos_ids=(3,),
        key=jax.random.key(9),
    )
    events = answer(
        engine_of(llama), Request(tuple(prompt[0].tolist()), 40, sampling, seed=9, end_ids=(3,))
    )
    tokens = [event[1] for event in events if event[0] == "Token"]
    assert tokens == np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist()
    assert len(tokens) > 8
    logprobs = [event[2] for event in events if event[0] == "Token"]
    np.testing.assert_allclose(
        logprobs, np.asarray(out.logprobs)[0, : len(logprobs)], rtol=1e-4, atol=1e-4
    )


def test_prompt_log_probabilities_are_those_of_the_tokens_in_the_prompt(llama: Llama):
    engine, length = engine_of(llama, widths=(16,)), 39  # three chunks, all of it in the window
    prompt = tuple(np.random.default_rng(1).integers(0, VOCABULARY, length).tolist())
    events = answer(engine, Request(prompt, 0, alternatives=3, prompt_logprobs=True))
    (_, logprobs, likely), end = events
    assert end == ("Ended", "length")
    exact = np.asarray(jax.nn.log_softmax(forward(llama, jnp.array([prompt])), axis=-1))[0]
    assert (logprobs[0], likely[0]) == (0, ())
    expected = exact[np.arange(length - 1), prompt[1:]]
    np.testing.assert_allclose(logprobs[1:], expected, rtol=1e-4, atol=1e-4)
    assert np.abs(np.array(logprobs[1:]) - np.roll(expected, 1)).max() > 0.1
    for at in range(1, length):
        assert [token for token, _ in likely[at]] == np.argsort(-exact[at - 1])[:3].tolist(), (
            f"{at=}"
        )
    then = Request(prompt, 3)
    plain = answer(engine, then)
    scored = answer(engine, Request(prompt, 3, prompt_logprobs=True))
    assert [event[1] for event in plain[1:-1]] == [event[1] for event in scored[1:-1]], (
        "scoring a prompt changes what follows it"
    )


def test_requests_that_leave_at_once_make_room(llama: Llama):
    engine = engine_of(llama, queue_limit=4, steps=1)
    tickets = [engine.submit(Request((1, 2), 40)) for _ in range(4)]
    for _ in range(4):
        engine.advance()
    assert (engine.busy, engine.waiting) == (SLOTS, 1)
    engine.cancel(tickets[1])
    events = engine.advance()
    assert Ended(tickets[1], "cancelled") in events
    assert PromptRead(tickets[3]) in events, "the slot was not given to the request that waited"
    # the first token of the new one, and those of a step
    assert sum(isinstance(event, Token) for event in events) == 1 + SLOTS, (
        "a request waited for another's prompt"
    )
    for ticket in tickets:
        engine.cancel(ticket)
    engine.advance()
    assert engine.idle
    assert engine.live_tokens() == 0


def test_prompts_that_need_a_program_wait_for_it_while_others_decode(llama: Llama):
    engine = engine_of(llama)
    engine.warm_up(wait=False)
    long, programs = Request(tuple(range(40)), 2), engine._compiler.programs
    programs[WIDTHS[-1], False].result()
    expected = answer(engine, long)
    programs[WIDTHS[-1], False] = pending = Future()
    short = engine.submit(Request((1, 2), 20))
    waits = engine.submit(long)
    events = [event for _ in range(6) for event in engine.advance()]
    assert {event.ticket for event in events} == {short}
    assert sum(isinstance(event, Token) for event in events) == 7
    pending.set_result(None)
    found = [without_ticket(event) for event in drained(engine) if event.ticket == waits]
    assert found == expected


def test_a_program_that_cannot_be_compiled_fails_its_request_alone(
    llama: Llama, caplog: pytest.LogCaptureFixture
):
    engine = engine_of(llama)
    engine.warm_up()
    engine._compiler.programs[WIDTHS[-1], False] = failed = Future()
    failed.set_exception(RuntimeError("no room for a program"))
    ticket, other = engine.submit(Request(tuple(range(40)), 2)), engine.submit(Request((1, 2), 2))
    ends = {event.ticket: event.reason for event in drained(engine) if isinstance(event, Ended)}
    assert ends == {ticket: "failed", other: "length"}
    assert "no room for a program" in caplog.text
    # the next request asks for the program again
    again = answer(engine, Request(tuple(range(40)), 2))
    assert [event[0] for event in again] == ["PromptRead", "Token", "Token", "Ended"]


def test_the_queue_is_bounded(llama: Llama):
    engine = engine_of(llama, queue_limit=2)
    for _ in range(SLOTS + 2):
        engine.submit(Request((1,), 1))
    with pytest.raises(QueueFullError, match="2 requests are waiting, and the queue holds 2"):
        engine.submit(Request((1,), 1))
    assert len([event for event in drained(engine) if isinstance(event, Ended)]) == SLOTS + 2
    engine.submit(Request((1,), 1))


def test_a_request_over_the_capacity_is_refused_and_one_that_fills_it_is_not(llama: Llama):
    engine = engine_of(llama)
    with pytest.raises(
        CapacityError, match="90 prompt \\+ 7 new tokens are 97, and a row of the cache holds 96"
    ):
        engine.submit(Request((1,) * 90, 7))
    events = answer(engine, Request((1,) * 90, 6))
    assert [event[0] for event in events] == ["PromptRead", *["Token"] * 6, "Ended"]
