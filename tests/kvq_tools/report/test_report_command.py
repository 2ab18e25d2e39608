"""`kvq report`: users' mistakes are one line, and JSON lists the written files."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from kvq_tools.report import quality, times

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from tests.kvq_tools.report.small_report import (
    CACHES,
    CONTEXT,
    SAMPLE,
    STEPS,
    TEXT,
    WINDOW,
    expect_error,
)

BAD = {
    "nothing asked": ((), "needs MODEL and --text and --cache, or --from"),
    "no cache": (("embedded", "--text", "{text}"), "needs --cache, or --from"),
    "both": (("embedded", "--from", "{json}"), "leave out MODEL"),
    "settings of a report that is there": (
        ("--from", "{json}", "--window", "64"),
        "leave out --window",
    ),
    "the same cache twice": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--cache", "int4"),
        "--cache int4 is given twice",
    ),
    "context beyond the model": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--contexts", "64,4096"),
        "4096 is beyond the 2048",
    ),
    "context too short": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--contexts", "4"),
        f"no room for {times.STEPS + 1} steps",
    ),
    "context that is no number": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--contexts", "a"),
        "'a' must be an integer",
    ),
    "missing text": (("embedded", "--text", "{text}.none", "--cache", "int4"), "No such file"),
    "window beyond the model": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--window", "4096"),
        "beyond the 2048 positions",
    ),
    "no json": (("--from", "{text}"), "is not JSON"),
    "missing json": (("--from", "{json}.none"), "No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(case, made, tmp_path, run):
    arguments, message = BAD[case]
    filled = [a.format(text=made / "text.txt", json=made / "report.json") for a in arguments]
    expect_error(run("report", *filled, "--out", tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_refused_and_kept(made, tmp_path, run):
    shutil.copy(made / "text.txt", tmp_path / "out")
    expect_error(
        run(
            "report",
            "embedded",
            "--text",
            made / "text.txt",
            "--cache",
            "int4",
            "--out",
            tmp_path / "out",
        ),
        "is a file",
    )
    assert (tmp_path / "out").read_text() == TEXT


def test_without_matplotlib_one_line_says_what_to_install(made, tmp_path, run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find(name, *more),
    )
    expect_error(
        run("report", "--from", made / "report.json", "--out", tmp_path),
        "pip install 'kvq-jax[report]'",
    )


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
