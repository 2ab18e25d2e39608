"""Errors while a command works are one line, and a bug keeps its traceback. What is refused before
any work is in test_refusals_of_commands.py."""

import jax
import pytest

import kvq_jax as kvq
from kvq_tools.cli import main


def assert_one_line_error(result, message):
    code, out, err = result
    progress = ("kvq: loading", "kvq: warning", "kvq: making", "kvq: counting")
    errors = [line for line in err.splitlines() if not line.startswith(progress)]
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
    assert_one_line_error(
        run(f"generate {bare} --prompt-ids 1,2 --capacity 4096 --max-new-tokens 8"),
        "a cache of 4096 tokens, which takes 1.00 MiB, beside the model: RESOURCE_EXHAUSTED",
    )


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(_):
        raise ValueError("a bug")

    monkeypatch.setattr("kvq_tools.cli.commands.methods.run", broken)
    with pytest.raises(ValueError, match="a bug"):
        main.main(["methods"])
