"""Task commands: default lengths, tables, and users' mistakes in one line."""

from __future__ import annotations

import argparse
import functools
import itertools

import pytest

from kvq_tools.cli import task_runs
from kvq_tools.evaluation.tasks import passkey
from tests.kvq_models.checkpoints import tiny_config
from tests.kvq_tools.evaluation.task_samples import (
    embedded_prompts,
    lines,
)


def default_lengths(make, positions):
    """Return the lengths of the samples that a command makes for a model of so many positions
    without --lengths."""
    options = argparse.Namespace(lengths=None, limit=1, seed=0, max_new_tokens=None)
    samples = task_runs.generated(options, tiny_config(max_position_embeddings=positions), make)
    return [
        length for length, _ in itertools.groupby(sample.labels["length"] for sample in samples)
    ]


def test_default_lengths_are_those_within_the_positions_that_the_question_fits(capsys):
    make = functools.partial(passkey.generated, embedded_prompts(), depths=(0.0,))
    assert default_lengths(make, 4096) == [1024, 2048, 4096]
    assert capsys.readouterr().err == ""
    assert default_lengths(make, 256) == [128, 256], "the question alone takes more than 64 tokens"
    told = capsys.readouterr().err
    assert "no samples of 64 tokens: the question needs about 1" in told, told


BAD_REQUESTS = {
    "too long": (
        ("passkey", "--lengths", "400"),
        "and the model was trained for 256 positions: take a shorter one",
    ),
    "too few positions": (
        ("niah",),
        "and the model was trained for 256 positions, which include --max-new-tokens (now 128)",
    ),
    "no depth": (("passkey", "--depths", "0,2"), "between 0 and 1"),
    "data and lengths": (
        ("passkey", "--data", "{tmp}/empty", "--lengths", "9"),
        "--lengths is for generated samples",
    ),
    "no text": (
        ("niah", "--task", "multikey_1", "--max-new-tokens", "4"),
        "give one (--text FILE)",
    ),
    "empty data": (("passkey", "--data", "{tmp}/empty"), "has no samples"),
    "answers exist": (
        ("passkey", "--data", "{tmp}/row", "--answers", "{tmp}/row"),
        "must be a new file",
    ),
    "no room": (
        ("passkey", "--data", "{tmp}/row", "--max-new-tokens", "255"),
        "and the model was trained for 256 positions",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_one_line_before_weights_are_read(case, tiny, tmp_path, run, monkeypatch):
    monkeypatch.setattr(task_runs, "load_llama", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "empty").write_text("")
    lines(tmp_path / "row", {"input": "a", "target": "c"})
    (command, *options), message = BAD_REQUESTS[case]
    code, out, err = run(command, tiny, *(option.format(tmp=tmp_path) for option in options))
    assert (code, out) == (2, ""), err
    errors = [line for line in err.splitlines() if "kvq: error:" in line]
    assert len(errors) == 1, err
    assert message in errors[0], errors[0]
