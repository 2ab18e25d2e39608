"""Steps that run ahead: the next one begins before the tokens of the last one are read, and no
answer shows it."""

import dataclasses

import pytest

from kvq_models import Llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import Ended, Event, Request, Token
from tests.kvq_models.inference.engine.test_engine import (
    answer,
    drained,
    engine_of,
    some_requests,
)

PLAIN = Request((1, 2, 3), 6)


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


class InStep(Engine):
    """An engine whose steps do not run ahead: each of them is read at once."""

    def _step(self, events: list[Event]) -> None:
        super()._step(events)
        if (under_way := self._under_way) is not None:
            self._under_way = None
            self._end_step(under_way, events)


def test_a_step_begins_before_the_tokens_of_the_last_one_are_read(llama: Llama):
    engine = engine_of(llama)
    engine.submit(PLAIN)
    first = engine.advance()  # reads the prompt, draws a token, and begins a step
    assert len(tokens_of(first)) == 1
    assert engine._under_way is not None
    assert engine.counts.steps == 1
    second = engine.advance()
    assert len(tokens_of(second)) == 1
    assert engine.counts.steps == 2, "the second step began after the first one's tokens were read"
    drained(engine)
    assert engine.counts.steps == PLAIN.max_new_tokens - 1, "a step drew nothing that was asked for"


def test_answers_are_those_of_steps_that_wait(llama: Llama):
    ahead, waiting = engine_of(llama), engine_of(llama, kind=InStep)
    for request in some_requests():
        assert answer(ahead, request) == answer(waiting, request), request
    assert ahead.counts.steps > waiting.counts.steps, "no step ran ahead of an end token"


def test_what_a_step_draws_after_the_end_of_an_answer_is_dropped(llama: Llama):
    engine = engine_of(llama, slots=1)
    plain = tokens_of_alone(engine, PLAIN)
    ends = dataclasses.replace(PLAIN, end_ids=(plain[2],))
    engine.submit(ends)
    engine.submit(PLAIN)  # takes the slot while the last step of `ends` is under way
    events = drained(engine)
    stop = plain.index(plain[2]) + 1
    first, second = sorted({event.ticket for event in events})
    assert tokens_of([e for e in events if e.ticket == first]) == plain[:stop]
    assert tokens_of([e for e in events if e.ticket == second]) == plain
    assert [e.reason for e in events if isinstance(e, Ended)] == ["ended", "length"]


def tokens_of_alone(engine: Engine, request: Request) -> list[int]:
    engine.submit(request)
    return tokens_of(drained(engine))


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_count_every_token_before_the_next_step(llama: Llama, name: str):
    engine = engine_of(llama)
    request = dataclasses.replace(PLAIN, **{name: 0.5})
    engine.submit(request)
    engine.advance()
    assert engine._under_way is None
    assert len(tokens_of(drained(engine))) == request.max_new_tokens - 2


def test_tokens_do_not_wait_for_a_prompt(llama: Llama):
    engine = engine_of(llama)
    engine.submit(PLAIN)
    engine.submit(dataclasses.replace(PLAIN, prompt=tuple(range(70))))
    engine.advance()
    assert engine._under_way is None, "its token would come after the second prompt's first chunk"


def test_a_cancelled_answer_gets_no_token_of_a_step_under_way(llama: Llama):
    engine = engine_of(llama)
    ticket = engine.submit(PLAIN)
    engine.advance()
    assert engine._under_way is not None
    engine.cancel(ticket)
    (ended,) = engine.advance()
    assert ended == Ended(ticket, "cancelled")
    assert engine.idle
    assert len(tokens_of_alone(engine, PLAIN)) == PLAIN.max_new_tokens
