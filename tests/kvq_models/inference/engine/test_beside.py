"""What one request asks for does not touch others: biases and penalties stay in its slot, and its
programs are compiled beside them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models import Llama, forward
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import Accepted
from kvq_models.inference.engine.compiling import Compiler, Kind
from kvq_models.inference.engine.requests import Ended, PromptRead, Request, Token
from tests.kvq_models.inference.engine.test_engine import VOCABULARY, answer, drained, engine_of

SPEC = "kivi:bits=2,recent=96,block=32"  # nothing is quantized: answers are the model's
PROMPT = (5, 6, 7, 8)
every_logit = jax.jit(forward)


def greedy(llama: Llama, request: Request) -> list[int]:
    """Return the tokens that the formula gives, from all logits of the model."""
    tokens = list(request.prompt)
    drawn = np.zeros(VOCABULARY)
    bias = np.zeros(VOCABULARY)
    for token, value in request.bias:
        bias[token] += value
    for _ in range(request.max_new_tokens):
        padded = jnp.array([tokens + [0] * (32 - len(tokens))])
        logits = np.asarray(every_logit(llama, padded))[0, len(tokens) - 1] + bias
        logits = logits - request.frequency_penalty * drawn
        logits = logits - request.presence_penalty * (drawn > 0)
        tokens.append(int(logits.argmax()))
        drawn[tokens[-1]] += 1
    return tokens[len(request.prompt) :]


def test_penalties_and_biases_are_the_formula_and_stay_in_their_slot(llama: Llama):
    engine = engine_of(llama, SPEC)
    asked = [
        Request(PROMPT, 16),
        Request(PROMPT, 16, frequency_penalty=0.3, presence_penalty=0.2),
        Request(PROMPT, 16, presence_penalty=2.0),
        Request(PROMPT, 16, frequency_penalty=-0.5, bias=((9, 0.2), (11, -100.0))),
        Request(PROMPT, 16, bias=tuple((token, -100.0) for token in range(90))),
        Request(PROMPT, 16),  # in a slot that had penalties
    ]
    tickets = [engine.submit(request) for request in asked]
    events = drained(engine)
    found = [
        [event.token for event in events if isinstance(event, Token) and event.ticket == ticket]
        for ticket in tickets
    ]
    expected = [greedy(llama, request) for request in asked]
    assert found == expected
    assert found[0] == found[5]
    assert len({tuple(tokens) for tokens in found}) == 5, "two rules draw the same tokens"
    assert set(found[4]) <= set(range(90, VOCABULARY))


def test_log_probabilities_stay_the_models(llama: Llama):
    engine = engine_of(llama, SPEC)
    plain = answer(engine, Request(PROMPT, 1, alternatives=3))
    forced = answer(engine, Request(PROMPT, 1, alternatives=3, bias=((9, 100.0),)))
    assert (forced[1][1], forced[1][3]) == (9, plain[1][3])
    logits = np.asarray(every_logit(llama, jnp.array([PROMPT])))[0, -1]
    expected = logits[9] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    np.testing.assert_allclose(forced[1][2], expected, rtol=1e-4)


def test_the_first_request_that_scores_its_prompt_stops_nobody(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
):
    engine, compiled, score_chunk = engine_of(llama, SPEC), threading.Event(), programs.score_chunk
    engine.warm_up()

    def slow(*arguments: object) -> object:
        assert compiled.wait(30)
        return score_chunk(*arguments)

    monkeypatch.setattr(programs, "score_chunk", slow)
    running = engine.submit(Request(PROMPT, 40))
    engine.advance()
    scored = engine.submit(Request(PROMPT, 1, prompt_logprobs=True))
    other = engine.submit(Request(PROMPT, 3))
    events = [event for _ in range(10) for event in engine.advance()]
    assert sum(isinstance(event, Token) and event.ticket == running for event in events) == 10
    assert Ended(other, "length") in events, "a plain request waits for the program of another"
    assert scored not in {event.ticket for event in events}
    compiled.set()
    (read,) = [
        event
        for event in drained(engine)
        if isinstance(event, PromptRead) and event.ticket == scored
    ]
    assert len(read.logprobs) == len(PROMPT)


def test_an_engine_begins_again_after_a_failure(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    engine, request = engine_of(llama, SPEC), Request(PROMPT, 8)
    expected = answer(engine, request)
    engine.submit(request)
    engine.submit(request)
    engine.advance()
    with monkeypatch.context() as patch:
        patch.setattr(programs, "step_slots", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.advance()
    left = jax.tree.leaves((engine.cache, engine._row))
    engine.reset()
    assert all(leaf.is_deleted() for leaf in left), "there may be no room for two caches"
    assert engine.idle
    assert answer(engine, request) == expected


def test_tokens_are_counted_while_requests_come(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    engine, request = engine_of(llama, SPEC, slots=1), Request(PROMPT, 8)
    for _ in range(2):
        engine.submit(request)
    engine.advance()
    held = len(PROMPT) + 1  # the newest token is not there yet
    assert engine.live_tokens() == held

    def meanwhile(accepted: Accepted) -> int:
        engine.submit(request)
        return accepted.read + accepted.drawn - 1 if accepted.drawn else 0

    monkeypatch.setattr(Accepted, "tokens_held", property(meanwhile))
    assert engine.live_tokens() == held


def test_the_programs_of_the_first_request_are_compiled_before_others(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
):
    begun, started, released = list[Kind](), threading.Event(), threading.Event()

    def run(self: Compiler, row: object, width: int, scores: bool) -> object:
        begun.append((width, scores))
        started.set()
        assert released.wait(30)
        return row

    monkeypatch.setattr(Compiler, "_run", run)
    monkeypatch.setattr(Compiler, "_empty", lambda self: object())
    engine = engine_of(llama, SPEC, widths=(4, 8, 12, 16))
    compiler = Compiler(llama, engine._row_layout, None, width=2)
    engine._compiler = compiler
    compiler.start([(4, False), (8, False), (12, False), (16, False)])
    assert started.wait(30)
    engine.submit(Request((5,) * 16, 1))  # of one chunk of 16
    engine.submit(Request((5,) * 12, 1))
    assert engine.advance() == []
    released.set()
    while compiler.busy:
        compiler.wait(30)
    assert begun[0] == (4, False), "it began before the requests came"
    assert begun[1:] == [(16, False), (8, False), (12, False)]
