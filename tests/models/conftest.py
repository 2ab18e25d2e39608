"""How tests run `kvq`: in this process, from its arguments to its exit code."""

from __future__ import annotations

import json

import pytest

from models.cli import main


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit code, stdout, stderr)."""

    def call(*arguments):
        code = main.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    def call(*arguments):
        code, out, err = run(*arguments, "--json")
        assert code == 0, f"{arguments} failed: {err}"
        return json.loads(out)

    return call
