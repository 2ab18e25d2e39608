"""`kvq report`: users' mistakes are one line, and JSON lists the written files."""

import importlib.util

import pytest

from kvq_tools.report import quality

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error
from tests.kvq_tools.report.small_report import CACHES, CONTEXT, SAMPLE, STEPS, WINDOW


def test_without_matplotlib_one_line_says_what_to_install(made, tmp_path, run, monkeypatch):
    find = importlib.util.find_spec

    def find_others(name, *more):
        return None if name == "matplotlib" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    refused = run("report", "--from", made / "report.json", "--out", tmp_path)
    assert_one_line_error(refused, "pip install 'kvq-jax[report]'")


def test_json_tells_what_was_written(made, tmp_path, run_json, report):
    found = run_json("report", "--from", made / "report.json", "--out", tmp_path)
    assert sorted(found["files"]) == sorted(str(file) for file in tmp_path.iterdir())
    assert [c["name"] for c in found["caches"]] == list(CACHES)
    assert [c["kl"] for c in found["caches"]] == [c.kl for c in report.caches]
    assert [c["quantized_tokens"] for c in found["caches"]] == [WINDOW - 1] * 2
    assert [c["front_by_kl"] for c in found["caches"]] == list(quality.front_by(report, "kl"))
    assert found["command"].startswith("kvq report embedded --text ")
    assert (
        f"--mode fake --limit 64 --buckets 4 --steps {STEPS} --sample {SAMPLE} --contexts {CONTEXT}"
        in found["command"]
    )
