"""Samples from files: they are asked as they are, and bad files are named with their line."""

import re

import pytest

from kvq_tools.evaluation.tasks import niah, passkey
from kvq_tools.evaluation.tasks.filler import depth_of
from kvq_tools.evaluation.tasks.runner import check_samples
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample
from tests.kvq_models.checkpoints import tiny_config
from tests.kvq_tools.evaluation.task_samples import embedded_prompts, lines, prompt_text


def test_ready_made_samples_are_asked_as_they_are(tmp_path):
    prompts = embedded_prompts()
    keys = lines(
        tmp_path / "keys",
        {"input": "No. The pass key is 12345. No. No.", "target": "12345"},
        "",
        {"input": "b", "target": "1"},
    )
    first, _ = passkey.from_file(keys, prompts)
    asked = "No. The pass key is 12345. No. No.What is the pass key? The pass key is "
    assert prompt_text(first) == asked
    assert (first.answers, first.labels["depth"]) == (("12345",), 0.5)
    assert len(passkey.from_file(keys, prompts, limit=1)) == 1
    whole = {"input": "hay needle hay. It is", "outputs": ["needle", "hay"]}
    split = {"input": "hay needle hay.", "answer_prefix": " It is", "outputs": ["needle"]}
    file = lines(tmp_path / "hay", whole, split)
    asked = map(prompt_text, niah.from_file(file, prompts, suffix=":"))
    assert list(asked) == ["hay needle hay. It is:"] * 2
    assert niah.from_file(file, prompts)[0].answers == ("needle", "hay")


def test_a_chat_template_holds_the_question_and_the_answer_begins_after_it():
    tokenizer = embedded_prompts().tokenizer
    prompts = TaskPrompts(tokenizer, lambda turn: list(tokenizer(f"<user>{turn}</user>").input_ids))
    (sample,) = passkey.generated(prompts, lengths=(200,), depths=(0,), count=1)
    assert prompt_text(sample).endswith("What is the pass key?</user> The pass key is ")


BAD_FILES = {
    "empty": ("", "has no samples"),
    "no json": ("{", "line 1: not JSON"),
    "a list": ("[1]", "must be an object, not a list"),
    "no field": ('{"input": "a"}', "needs the field 'outputs', a list"),
    "a prefix that is not a text": (
        '{"input": "a", "outputs": ["c"], "answer_prefix": 7}',
        "'answer_prefix' must be a str, not a int",
    ),
    "outputs that are not texts": (
        '{"input": "a", "outputs": [5]}',
        "'outputs' must list texts only",
    ),
    "half a surrogate pair": (
        '{"input": "\\ud800", "outputs": ["c"]}',
        "the field 'input' is not a text",
    ),
    "endless": ("[" * 100_000, "line 1: not JSON"),
}


def test_a_file_of_windows_is_read_or_named(tmp_path):
    content = '{"input": "a needle", "outputs": ["needle"]}\r\n'
    (tmp_path / "file").write_bytes(content.encode("utf-8-sig"))
    assert niah.from_file(tmp_path / "file", embedded_prompts())[0].answers == ("needle",)
    (tmp_path / "file").write_bytes(content.encode("utf-16"))
    with pytest.raises(ValueError, match="file' is not UTF-8 text; save it as UTF-8"):
        niah.from_file(tmp_path / "file", embedded_prompts())


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_with_its_line(case, tmp_path):
    content, message = BAD_FILES[case]
    (tmp_path / "file").write_text(content)
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        niah.from_file(tmp_path / "file", embedded_prompts())


def test_an_empty_prompt_is_refused_and_an_empty_text_hides_nothing():
    with pytest.raises(ValueError, match="sample 0 has an empty prompt"):
        check_samples([TaskSample((), ("a",), 1)], tiny_config())
    assert depth_of("", "") is None


@pytest.mark.parametrize(
    ("command", "answer", "prompt"),
    [
        ("passkey", {"target": "12345"}, "What is the pass key? The pass key is "),
        ("niah", {"outputs": ["12345"]}, "of the file"),
    ],
)
def test_the_rules_that_are_told_are_those_of_the_file(
    command, answer, prompt, model, tmp_path, run_json
):
    file = lines(tmp_path / "file", {"input": "It is 12345. No.", **answer})
    rules = run_json(command, model, "--data", file, "--max-new-tokens", "2")["rules"]
    assert set(rules) == {"prompt", "depth", "length", "score"}
    assert rules["prompt"].endswith(prompt)
    assert "nearest quarter" in rules["depth"]
