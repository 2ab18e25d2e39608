"""Verbatim quotes and tool calls: the samples, the scores, and prompts whose end is decoded."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

import kvq_jax as kvq
from kvq_models import load_llama
from kvq_tools.evaluation.tasks.runner import run
from kvq_tools.evaluation.tasks.sample import AnswerRule, TaskPrompts, TaskSample
from kvq_tools.evaluation.text import passage
from laboratory.quality import quote, tool_call
from laboratory.quality.shared_prompts import run_together


@pytest.fixture(scope="module")
def embedded():
    return load_llama("embedded", dtype="float32")


@pytest.fixture(scope="module")
def prompts(embedded):
    return TaskPrompts(embedded[1])


@pytest.mark.parametrize("depth", [0.0, 0.5])
def test_a_quoted_passage_stands_once_in_the_text_and_its_beginning_in_the_question(prompts, depth):
    make = partial(quote.generated, prompts, lengths=[600], depths=[depth], count=2)
    for sample in make(text=passage()):
        text, question = prompts.decode(list(sample.prompt)).rsplit("Repeat the passage", 1)
        (answer,) = sample.answers
        assert len(answer.split()) == quote.QUOTED
        assert text.count(answer) == 1
        assert answer not in question
        beginning = question.rpartition("The passage is: ")[2]
        assert f"{beginning} {answer}" in text
        assert 500 < len(sample.prompt) <= 600 - quote.MAX_NEW_TOKENS
    assert make(text=passage()) == make(text=passage())


def test_a_quote_scores_one_less_its_errors_and_white_space_does_not_count():
    sample = TaskSample((1,), ("to be or not",), 8)
    assert quote.score(sample, " to  be\nor not, that") == {"accuracy": 1, "verbatim": 1}
    scores = quote.score(sample, "to me or not")
    assert scores == {"accuracy": pytest.approx(11 / 12), "verbatim": 0}
    assert quote.score(sample, "")["accuracy"] == 0
    assert not quote.finished(sample, "to be or no")
    assert quote.finished(sample, "to be or nod")


def test_a_tool_call_is_valid_by_its_schema_and_right_by_its_values(prompts):
    samples = tool_call.generated(prompts, lengths=[700], count=3)
    assert {sample.labels["tool"] for sample in samples} == {tool.name for tool in tool_call.TOOLS}
    for sample in samples:
        text = prompts.decode(list(sample.prompt))
        assert text.endswith("Call:")
        history = re.findall(r"^Call: (.*)$", text, re.MULTILINE)
        for line in history:
            call = json.loads(line)
            assert tool_call.is_valid(call, call["tool"])
        assert len(history) >= 5
        right = sample.answers[0]
        assert tool_call.score(sample, f" {right}\nRequest: x") == {"accuracy": 1, "right": 1}
        other = json.loads(right)
        field, value = next(iter(other["arguments"].items()))
        changed = {field: value + 1 if isinstance(value, int) else "other"}
        valid = other | {"arguments": other["arguments"] | changed}
        assert tool_call.score(sample, json.dumps(valid)) == {"accuracy": 1, "right": 0}
        for broken in (right[:-1], "", "[1]", "null", '{"tool": "set_alarm"}'):
            assert tool_call.score(sample, broken) == {"accuracy": 0, "right": 0}, broken
        extra = other | {"arguments": other["arguments"] | {"more": 1}}
        assert tool_call.score(sample, json.dumps(extra))["accuracy"] == 0
        text_for_number = {name: str(value) for name, value in other["arguments"].items()}
        assert not tool_call.is_valid(other | {"arguments": text_for_number}, other["tool"])


def test_a_decoded_end_of_a_prompt_is_read_through_the_cache(embedded, prompts):
    """The first token of an answer stays the same with exact rows, and changes with 2-bit ones."""
    samples = quote.generated(
        prompts, lengths=[400], depths=[0, 0.2, 0.4, 0.6], count=1, text=passage(), max_new_tokens=1
    )

    def first_tokens(spec: str, through: int) -> list[str]:
        (answers,) = run_together(
            [(embedded[0], kvq.parse(spec))], quote.TASK, samples, prompts, batch=4, through=through
        )
        return [answer.text for answer in sorted(answers, key=lambda answer: answer.index)]

    exact = first_tokens("dense", 0)
    assert first_tokens("dense", 64) == exact
    assert first_tokens("int2:sink=0,recent=0,block=32", 64) != exact
    with pytest.raises(ValueError, match="through=400 must be at least 0 and below"):
        first_tokens("dense", 400)


def test_a_prompt_that_caches_share_is_answered_as_through_each_alone(embedded, prompts):
    llama, task = embedded[0], AnswerRule(lambda *_: {}, lambda *_: False)
    samples = [TaskSample(tuple(prompts.ids("one two three " * n)), (), 12) for n in (9, 2, 5)]
    caches = [kvq.parse("dense"), kvq.parse("k=int2+v=int2+cache:sink=0,recent=0,block=8")]
    candidates = [(llama, cache) for cache in caches]
    texts = []
    for cache, shared in zip(
        caches, run_together(candidates, task, samples, prompts, batch=2), strict=True
    ):
        alone, shared = (
            sorted(answers, key=lambda answer: answer.index)
            for answers in (run(llama, cache, task, samples, prompts, batch=2), shared)
        )
        assert shared == alone, str(cache)
        texts.append([answer.text for answer in alone])
    assert texts[0] != texts[1], "the caches make no difference"
