"""How tests run `kvq`: in this process, from its arguments to its exit code; and a finished calibration."""

from __future__ import annotations

import json

import pytest

from models import save_calibration
from models.cli import main
from tests.models import calibration_runs


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


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The work directory of a finished run."""
    directory = tmp_path_factory.mktemp("calibration") / "work"
    calibration_runs.run(directory)
    return directory


@pytest.fixture
def file(work, tmp_path):
    path = tmp_path / "f.safetensors"
    save_calibration(calibration_runs.run(work), path)
    return path
