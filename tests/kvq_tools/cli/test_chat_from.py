"""`kvq chat --from`: a text or the beginning of a chat that `kvq prefill` saved goes on as a chat,
and is not read again."""

import io
import pathlib

import pytest

from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error

TEXT = "the key of the cat is 17, that of the dog 5; " * 2
QUESTION, NEXT = "the key of the dog is", "and of the cat?"
FEW = ("--max-new-tokens", 6)


@pytest.fixture
def chat(run_json, talker: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    def call(typed: str, *options: object) -> list[dict]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        return run_json("chat", talker, *FEW, *options)["turns"]

    return call


def saved(run_json, talker: pathlib.Path, out: pathlib.Path, *options: object) -> pathlib.Path:
    run_json("prefill", talker, "--prompt", TEXT, "--out", out, "--capacity", 256, *options)
    return out


def test_a_saved_chat_goes_on_with_the_answers_of_one_conversation(
    run_json, chat, talker: pathlib.Path, tmp_path: pathlib.Path
):
    file = saved(run_json, talker, tmp_path / "f", "--chat")
    before = file.read_bytes()
    turns = chat(f"{QUESTION}\n{NEXT}\n/reset\n{QUESTION}\n", "--from", file)
    # a line of a pipe holds no paragraph, so the whole first message is asked through the file
    asked = run_json("generate", talker, "--from", file, "--prompt", QUESTION, *FEW)
    assert turns[0]["answer"] == asked["text"]
    assert turns[0]["prefilled_tokens"] == asked["prompt_tokens"] - asked["saved_tokens"] < 40
    assert turns[1]["prefilled_tokens"] < 40
    assert turns[1]["holds"]["tokens"] > turns[0]["holds"]["tokens"] > len(TEXT) // 4
    assert turns[2]["answer"] == turns[0]["answer"], "/reset returns to the saved chat"
    assert chat(f"{QUESTION}\n")[0]["answer"] != turns[0]["answer"], "the text changes nothing"
    assert file.read_bytes() == before


def test_a_saved_text_comes_before_the_conversation(
    run_json, chat, talker: pathlib.Path, tmp_path: pathlib.Path
):
    file = saved(run_json, talker, tmp_path / "f")
    turn, _ = chat(f"{QUESTION}\n{NEXT}\n", "--from", file, "--system", "short")
    joined = f"{TEXT}\n\n<system>short|<user>{QUESTION}|<assistant>"
    whole = run_json("generate", talker, "--prompt", joined, "--capacity", 256, *FEW)
    assert turn["answer"] == whole["text"]
    assert turn["prefilled_tokens"] < whole["prompt_tokens"] / 2, "the text was read again"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (("--chat",), ("--system", "short"), "leave out --system"),
        ((), ("--capacity", "64"), "leave out --capacity"),
        ((), ("--cache", "int4"), "--cache is 'int4'"),
    ],
)
def test_what_the_file_has_decided_is_refused(
    run, run_json, talker: pathlib.Path, tmp_path: pathlib.Path, kind, options, words
):
    file = saved(run_json, talker, tmp_path / "f", *kind)
    assert_one_line_error(run("chat", talker, "--from", file, *options), words)
