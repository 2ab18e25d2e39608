"""User errors are one line and exit code 2, found before weights are read. A bug keeps its
traceback."""

from __future__ import annotations

import importlib

import jax
import pytest

import kvq_jax as kvq
from kvq_tools.cli import main


def stop_before_weights(*_, **__):
    raise ValueError("weights were read")


BEFORE_WEIGHTS = {
    "missing directory": (("generate", "{tmp}/missing", "--prompt", "a"), "does not exist"),
    "unknown option": (
        ("generate", "{model}", "--prompt", "a", "--cache", "kivi:bit=2"),
        "options: bits, group_size",
    ),
    "option that does not fit": (
        ("generate", "{model}", "--prompt", "a", "--cache", "kivi:group_size=7,block=7"),
        "divisors",
    ),
    "over capacity": (
        (
            "generate",
            "{model}",
            "--prompt-ids",
            "1,2,3",
            "--max-new-tokens",
            "8",
            "--capacity",
            "10",
        ),
        "over --capacity 10",
    ),
    "empty prompt": (("generate", "{model}", "--prompt", ""), "prompt is empty"),
    "token id out of range": (
        ("generate", "{bare}", "--prompt-ids", "1,300"),
        "token id 300 is outside",
    ),
    "no tokenizer": (("generate", "{bare}", "--prompt", "a"), "--prompt-ids"),
    "no prompt": (("generate", "{model}"), "--prompt"),
    "bad temperature": (
        ("generate", "{model}", "--prompt", "a", "--temperature=-1"),
        "temperature=-1.0",
    ),
    "prompt that is no text": (
        ("generate", "{model}", "--prompt", "a\udcffb"),
        "the prompt is not UTF-8 text",
    ),
    "enormous seed": (
        ("generate", "{model}", "--prompt", "a", "--seed", "9" * 26),
        "argument --seed: '9999",
    ),
    "enormous capacity": (
        ("generate", "{model}", "--prompt", "a", "--cache", "dense", "--capacity", "999999999999"),
        "a cache of 999999999999 tokens takes 232.83 TiB, and this device has",
    ),
    "no chat template": (("generate", "{model}", "--prompt", "a", "--chat"), "no chat template"),
    "broken config.json": (("doctor", "{tmp}/broken"), "not valid JSON"),
    "chat without a template": (("chat", "{model}"), "has no chat template"),
    "chat without a tokenizer": (("chat", "{bare}"), "has no tokenizer"),
    "calibration into no folder": (
        (
            "calibrate",
            "{model}",
            "--text",
            "{tmp}/text",
            "--cache",
            "kvquant",
            "--out",
            "{tmp}/none/f",
        ),
        "must be a file in a directory that exists",
    ),
    "text that is not there": (
        ("eval", "{model}", "--text", "{tmp}/none.txt", "--cache", "int4"),
        "none.txt",
    ),
    "text of one token": (
        ("eval", "{model}", "--text", "{tmp}/text", "--cache", "int4", "--limit", "1"),
        "at least two tokens, and this one has 1",
    ),
    "window beyond the model": (
        ("eval", "{model}", "--text", "{tmp}/text", "--cache", "int4", "--window", "257"),
        "beyond the 256 positions",
    ),
    "option of another mode": (
        ("eval", "{model}", "--text", "{tmp}/text", "--cache", "int4", "--chunk", "8"),
        "--chunk is for --mode chunked, not decode",
    ),
    "no prompt for statistics": (
        ("eval", "{model}", "--text", "{tmp}/text", "--cache", "squat", "--prompt", "0"),
        "'squat' takes statistics from a prompt",
    ),
    "malformed budget": (("memory", "{model}", "--cache", "dense", "--budget", "lots"), "24GiB"),
    "demo without a tokenizer": (("demo", "--model", "{bare}"), "has no tokenizer"),
    "demo that generates too much": (
        ("demo", "--model", "{model}", "--new-tokens", "500"),
        "more than the 128 tokens",
    ),
    "unknown command": (("generat",), "no command 'generat'. Did you mean generate?"),
    "misspelt option beside a missing one": (
        ("eval", "{model}", "--txt", "f"),
        "kvq eval has no option --txt. Did you mean --text?",
    ),
    "misspelt option with its value": (
        ("generate", "{model}", "--cahce=kivi"),
        "has no option --cahce. Did you mean --cache?",
    ),
    "misspelt method": (("memory", "{model}", "--cache", "kivy"), "Did you mean kivi?"),
    "misspelt option of a method": (
        ("memory", "{model}", "--cache", "kivi:grup_size=16"),
        "Did you mean group_size?",
    ),
    "empty prompt file": (
        ("generate", "{model}", "--prompt-file", "{tmp}/empty"),
        "prompt is empty",
    ),
    "empty prompt to save": (
        ("prefill", "{model}", "--prompt", "", "--out", "{tmp}/f"),
        "prompt is empty",
    ),
    "empty prompt of many": (
        ("generate", "{model}", "--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out"),
        "line 2: the prompt is empty; give at least one character",
    ),
}


@pytest.mark.parametrize("case", BEFORE_WEIGHTS)
def test_bad_input_is_one_line_and_found_before_weights_are_read(
    case, model, bare, tmp_path, run, monkeypatch
):
    for name in ("one_generation", "commands.demo", "commands.chat", "commands.eval"):
        monkeypatch.setattr(
            importlib.import_module(f"kvq_tools.cli.{name}"),
            "load_llama",
            stop_before_weights,
        )
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("the key of the cat " * 99)
    (tmp_path / "prompts.jsonl").write_text('"a"\n""\n')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    arguments, message = BEFORE_WEIGHTS[case]
    assert_one_line_error(
        run(*(a.format(model=model, bare=bare, tmp=tmp_path) for a in arguments)), message
    )


def assert_one_line_error(result, message):
    code, out, err = result
    errors = [
        line for line in err.splitlines() if not line.startswith(("kvq: loading", "kvq: warning"))
    ]
    assert (code, out) == (2, ""), f"{code=} {out=} {err=}"
    assert len(errors) == 1, f"expected one line, got {err!r}"
    assert errors[0].startswith("kvq: error: ")
    assert message in errors[0], errors[0]
    assert "Traceback" not in err


def test_a_cache_without_room_beside_the_model_is_one_line_that_names_its_bytes(
    bare, run, monkeypatch
):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating")

    monkeypatch.setattr(kvq, "init_cache", full)
    result = run(
        "generate", bare, "--prompt-ids", "1,2", "--capacity", "4096", "--max-new-tokens", "8"
    )
    assert_one_line_error(
        result,
        "a cache of 4096 tokens, which takes 1.00 MiB, beside the model: RESOURCE_EXHAUSTED",
    )


def test_an_implementation_that_cannot_run_is_one_line_before_anything_is_loaded(bare, run):
    arguments = (
        "generate",
        bare,
        "--prompt-ids",
        "1,2",
        "--cache",
        "kivi:pre_rope=true",
        "--implementation",
        "pallas",
    )
    assert_one_line_error(run(*arguments), "implementation='pallas' cannot run: ")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("kvq_tools.cli.commands.methods"),
        "run",
        raiser(ValueError("a bug")),
    )
    with pytest.raises(ValueError, match="a bug"):
        main.main(["methods"])


def raiser(error):
    def run(_):
        raise error

    return run
