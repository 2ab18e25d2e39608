"""Calls of several steps: answers are those of single steps, and nobody waits long for one."""

import dataclasses

import pytest

from kvq_models import Llama
from kvq_models.inference.engine import steps
from kvq_models.inference.engine.accepted import Accepted
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import Ended, Event, Request, Token
from tests.kvq_models.inference.engine.test_engine import answer, drained, engine_of, some_requests

PLAIN = Request((1, 2, 3), 12)


@pytest.fixture
def without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call take all of its steps, however slow they are."""
    monkeypatch.setattr(steps, "CALL_SECONDS", 1e9)


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def tokens_alone(engine: Engine, request: Request) -> list[int]:
    engine.submit(request)
    return tokens_of(drained(engine))


def tokens_of_rounds(engine: Engine, request: Request) -> list[int]:
    """Return how many tokens each `advance` gives a request that is alone."""
    engine.submit(request)
    counts = []
    while not engine.idle:
        counts.append(len(tokens_of(engine.advance())))
    return counts


def test_a_call_takes_several_steps_once_the_first_token_is_sent(
    llama: Llama, without_a_clock: None
):
    # the prompt's own token comes in the first round too
    engine = engine_of(llama)
    assert tokens_of_rounds(engine, PLAIN) == [2, 8, 2]
    assert tokens_of_rounds(engine, PLAIN) == [2, 8, 2], "a first token waited for several steps"
    assert tokens_of_rounds(engine_of(llama, steps=3), PLAIN) == [2, 3, 3, 3, 1]
    assert tokens_of_rounds(engine_of(llama, steps=1), PLAIN) == [2] + [1] * 10


def test_answers_do_not_depend_on_the_steps_of_a_call(llama: Llama, without_a_clock: None):
    single, several = engine_of(llama, steps=1), engine_of(llama)
    for request in some_requests():
        assert answer(several, request) == answer(single, request), request
    assert several.counts.steps > single.counts.steps, "no call went past an end token"
    other = dataclasses.replace(some_requests()[1], seed=99)
    assert answer(several, other) != answer(single, some_requests()[1])


def test_a_call_takes_no_more_steps_than_fit_in_its_time():
    def count(*left: int, maximum: int = 8, seconds: float = 0.001, **options: float) -> int:
        request = dataclasses.replace(PLAIN, max_new_tokens=20, **options)
        slots = [Accepted(i, request, drawn=20 - one) for i, one in enumerate(left)]
        return steps.steps_of_call([None, *slots], maximum, seconds)

    assert count(20, 9) == 8
    assert count(20, 5) == 5, "a request has 5 tokens left"
    assert count(15, 19) == 1, "the first token of a request waits"
    assert count(20, maximum=2) == 2
    assert count(20, seconds=0.021) == 4
    assert count(20, seconds=0.3) == 1
    assert count(20, seconds=float("inf")) == 1
    assert count(20, presence_penalty=0.5) == count(20, frequency_penalty=0.5) == 1


def test_what_a_call_draws_after_the_end_of_an_answer_is_dropped(
    llama: Llama, without_a_clock: None
):
    engine = engine_of(llama, slots=1)
    plain = tokens_alone(engine, PLAIN)
    ends = dataclasses.replace(PLAIN, end_ids=(plain[4],))
    engine.submit(ends)
    engine.submit(PLAIN)  # takes the slot when `ends` has ended
    events = drained(engine)
    stop = plain.index(plain[4]) + 1
    assert stop < len(plain)
    first, second = sorted({event.ticket for event in events})
    assert tokens_of([e for e in events if e.ticket == first]) == plain[:stop]
    assert tokens_of([e for e in events if e.ticket == second]) == plain
    assert [e.reason for e in events if isinstance(e, Ended)] == ["ended", "length"]


def test_a_prompt_waits_for_one_step(llama: Llama, without_a_clock: None):
    engine = engine_of(llama, widths=(16,))
    first = engine.submit(dataclasses.replace(PLAIN, max_new_tokens=20))
    engine.advance()
    engine.submit(dataclasses.replace(PLAIN, prompt=tuple(range(40))))
    rounds = [[e for e in engine.advance() if e.ticket == first] for _ in range(4)]
    counts = [len(tokens_of(events)) for events in rounds]
    assert counts[:3] == [1, 1, 1], "a chunk of the prompt waited for several steps"
    assert counts[3] == 8, "no prompt is left, and calls stay short"


@pytest.mark.parametrize("count", [0, 9])
def test_a_call_takes_one_to_eight_steps(llama: Llama, count: int):
    with pytest.raises(ValueError, match=f"a call takes 1 to 8 steps.*steps={count}"):
        engine_of(llama, steps=count)
