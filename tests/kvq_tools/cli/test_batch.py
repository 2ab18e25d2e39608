"""`kvq generate --prompts`: each prompt gets the answer that it gets alone, and an interrupted run
continues where it stopped."""

import json
import pathlib
import shutil

import pytest

from kvq_models import load_llama, save_llama
from kvq_tools.cli import batch
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error

PROMPTS = [
    "the key of the cat is",
    {"prompt": "the dog", "max_new_tokens": 5, "id": "dog"},
    {"prompt_ids": [5, 6, 7], "temperature": 1.5, "seed": 3},
    {"prompt": "and the key of the dog is", "temperature": 0.7, "top_k": 5},
    {"prompt": "seven"},
]
OPTIONS = (
    "--cache=kivi:bits=2,recent=8,block=32",
    "--max-new-tokens=12",
    "--slots=2",
    "--capacity=64",
)


def lines(prompts: list) -> str:
    return "".join(f"{json.dumps(prompt)}\n" for prompt in prompts)


@pytest.fixture
def prompts(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines(PROMPTS))
    return path


def answers(path: pathlib.Path) -> dict[str | int, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {answer["id"]: answer for answer in found}


def test_every_prompt_gets_the_answer_that_it_gets_alone(
    run, run_json, model: pathlib.Path, prompts: pathlib.Path, tmp_path: pathlib.Path
):
    out = tmp_path / "answers.jsonl"
    done = run_json("generate", model, "--prompts", prompts, "--out", out, *OPTIONS)
    counts = {"prompts": 5, "answered": 5, "answered_before": 0, "slots": 2}
    assert done.items() >= ({"format": "kvq.batch"} | counts).items()
    found = answers(out)
    assert set(found) == {0, "dog", 2, 3, 4}
    assert done["new_tokens"] == sum(len(answer["tokens"]) for answer in found.values())
    assert found["dog"]["new_tokens"] <= 5
    # with one slot nobody is beside a prompt, and another one was there before it
    ids = 0, "dog", 2, 3, 4
    named = [
        (prompt if isinstance(prompt, dict) else {"prompt": prompt}) | {"id": name}
        for name, prompt in zip(ids, PROMPTS, strict=True)
    ]
    single, alone = tmp_path / "single.jsonl", tmp_path / "alone.jsonl"
    single.write_text(lines(named[::-1]))
    in_turn = ("generate", model, "--prompts", single, "--out", alone, *OPTIONS, "--slots=1")
    assert run(*in_turn)[0] == 0
    assert answers(alone) == found
    one = run_json("generate", model, "--prompt", PROMPTS[0], *OPTIONS[:2], "--capacity", "64")
    assert (one["tokens"], one["text"]) == (found[0]["tokens"], found[0]["text"])


def test_a_run_that_was_cut_goes_on(
    run,
    model: pathlib.Path,
    prompts: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    command = ("generate", model, "--prompts", prompts, "--out")
    assert run(*command, whole, *OPTIONS)[0] == 0
    real, asked = batch.answered, []

    def interrupted(engine, items):
        asked.append([item.id for item in items])
        for n, answer in enumerate(real(engine, items)):
            if n == 2 and len(asked) == 1:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(batch, "answered", interrupted)
    code, _, errors = run(*command, out, *OPTIONS)
    assert code == 130
    assert errors.endswith("kvq: interrupted: run the same command again to continue\n")
    with out.open("ab") as file:
        file.write(b'{"id": "dog", "key": "a line that was cu')
    first = [json.loads(line)["id"] for line in out.read_text().splitlines()[:-1]]
    assert len(first) == 2
    code, printed, errors = run(*command, out, *OPTIONS)
    assert code == 0, errors
    assert "3 of 5 prompts answered, 2 were there" in printed
    assert sorted(map(str, asked[1])) == sorted(map(str, set(answers(whole)) - set(first))), (
        "an answer was made twice"
    )
    assert answers(out) == answers(whole)
    code, printed, _ = run(*command, out, *OPTIONS)
    assert (code, printed) == (0, "[5 prompts, 5 were there; nothing to do]\n")
    assert not list(tmp_path.glob(".*.lock"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "prompts.jsonl' is empty"),
        ("\n \n", "has no prompts; write one on each line"),
        ("Name a river.\n", "line 1: write a text in quotes or an object, as JSON (Expecting"),
        ('"fine"\n{"prompt": 3}\n', "line 2: prompt must be a text, got 3"),
        ('{"prompt": "x", "colour": 1}\n', "line 1: unknown key 'colour'"),
        (
            '{"prompt": "x", "prompt_ids": [1]}\n',
            "line 1: give one of prompt, prompt_ids, messages",
        ),
        ('{"prompt_ids": [1, 300]}\n', "line 1: token id 300 is outside"),
        (
            '{"prompt": "x", "temperature": "hot"}\n',
            "line 1: temperature must be a number, got 'hot'",
        ),
        ('{"prompt": "x", "temperature": 1%s}\n' % ("0" * 400), "line 1: temperature=1000"),
        ('{"prompt": "x", "top_k": 4294967296}\n', "line 1: top_k=4294967296"),
        ('{"prompt": "x", "id": 1}\n"y"\n', "2 prompts with the id 1"),
        ('{"prompt": "x", "id": "\\ud800"}\n', "line 1: the id is not UTF-8 text; convert it"),
        (
            '{"prompt": "x", "max_new_tokens": 100}\n',
            "line 1: 2 prompt + 100 new tokens are 102, and a row of the cache holds 64",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}]}\n',
            "line 1: this model's tokenizer has no chat template",
        ),
    ],
)
def test_a_bad_line_is_named_before_any_work(
    run, model: pathlib.Path, tmp_path: pathlib.Path, text: str, message: str
):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_text(text)
    refused = run("generate", model, "--prompts", path, "--out", out, *OPTIONS)
    assert_one_line_error(refused, message)
    assert not out.exists()


def test_answers_of_other_settings_and_other_files_are_not_touched(
    run, model: pathlib.Path, prompts: pathlib.Path, tmp_path: pathlib.Path
):
    out, other = tmp_path / "answers.jsonl", tmp_path / "notes.txt"
    out.write_text('{"id": 0, "key": "0123456789abcdef", "text": "mine"}\n')
    refused = run("generate", model, "--prompts", prompts, "--out", out, *OPTIONS)
    told = "has an answer with the id 0 to another prompt, or of other settings"
    assert_one_line_error(refused, told)
    assert "mine" in out.read_text()
    for content in ("my notes", "my notes\n"):
        other.write_text(content)
        refused = run("generate", model, "--prompts", prompts, "--out", other, *OPTIONS)
        assert_one_line_error(refused, "name another")
        assert other.read_text() == content


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (b'{"id": 7, "prompt": "my only copy"}', True),
        (b'{"id": null, "key": "x"', True),
        (b'{"key": "x", "id": 1}', True),
        (b'{"id": 7, "key": "0123", "text": "cut', False),
        (b'{"id": "a \\"b', False),
        (b'{"id": "a", "k', False),
        (b'{"i', False),
    ],
)
@pytest.mark.parametrize("before", ["", '{"id": "another", "key": "0123456789abcdef"}\n'])
def test_a_last_line_is_kept_until_an_answer_replaces_it_and_only_if_it_is_a_cut_answer(
    run, model: pathlib.Path, prompts: pathlib.Path, tmp_path, monkeypatch, content, refused, before
):
    out = tmp_path / "answers.jsonl"
    out.write_bytes(before.encode() + content)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_engine_size", stop)
    code, _, errors = run("generate", model, "--prompts", prompts, "--out", out, *OPTIONS)
    assert (code, "is not an answer of kvq generate; name another file" in errors) == (
        (2, True) if refused else (130, False)
    )
    assert out.read_bytes() == before.encode() + content


@pytest.fixture
def asked(run, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a command up to its first answer, and returns its prompts."""
    items: list[batch.PromptLine] = []

    def stop(_path: str, every: list[batch.PromptLine], _before: dict) -> None:
        items[:] = every
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_pending", stop)

    def prompts_of(*arguments) -> dict[str | int, batch.PromptLine]:
        code, _, errors = run("generate", *arguments, *OPTIONS)
        assert code == 130, errors
        return {item.id: item for item in items}

    return prompts_of


def test_lines_draw_random_numbers_by_their_ids_and_those_of_one_prompt_by_their_seeds(
    asked, model: pathlib.Path, tmp_path: pathlib.Path
):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"

    def streams(prompts: list, *options: str) -> dict[str | int, tuple[int, int]]:
        path.write_text(lines(prompts))
        found = asked(model, "--prompts", path, "--out", out, "--temperature=1", *options)
        return {name: (item.request.seed, item.request.choice) for name, item in found.items()}

    equal = [{"prompt": "the dog", "id": name} for name in (*range(20), "0", "dog")]
    first = streams(equal)
    assert len(set(first.values())) == len(equal), "two equal prompts have equal answers"
    assert streams(equal[:-9:-1]).items() <= first.items(), "by the id alone"
    assert not set(streams(equal, "--seed=1").values()) & set(first.values())
    assert streams([{"prompt": "the dog", "id": "dog", "seed": 3}]) == {"dog": (3, 0)}


def test_answers_are_continued_by_the_same_weights_wherever_they_are_and_by_no_others(
    asked, model: pathlib.Path, prompts: pathlib.Path, tmp_path: pathlib.Path
):
    def keys(place: pathlib.Path | str, *options: str) -> list[str]:
        items = asked(place, "--prompts", prompts, "--out", tmp_path / "answers.jsonl", *options)
        return [item.key for item in items.values()]

    moved = shutil.copytree(model, tmp_path / "moved")
    before = keys(model)
    assert keys(moved) == keys(f"{model}/../{model.name}") == before
    others = [
        keys(model, *options.split())
        for options in ("--weights=dense", "--implementation=xla", "--activations=int8")
    ]
    llama, tokenizer = load_llama(moved, dtype="float32")
    llama.norm.scale[...] = 2 * llama.norm.scale[...]
    save_llama(llama, moved, tokenizer)
    others.append(keys(moved))
    every = [key for each in (before, *others) for key in each]
    assert len(set(every)) == len(every)


def test_answers_of_other_activations_are_not_continued(
    run, model: pathlib.Path, prompts: pathlib.Path, tmp_path: pathlib.Path
):
    """int8 activations round what the model computes."""
    command = "generate", model, "--prompts", prompts, "--out", tmp_path / "answers.jsonl", *OPTIONS
    run(*command)
    refused = run(*command, "--activations", "int8")
    assert_one_line_error(refused, "to another prompt, or of other settings")
