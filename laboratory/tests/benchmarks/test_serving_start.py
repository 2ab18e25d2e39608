"""The benchmark of a server's start counts what comes one after the other, in processes of its
own."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import serving_start

SIZE = ["--cache", "kivi:bits=2,recent=16,block=32", "--slots", "1", "--capacity", "64"]


def test_a_start_is_timed_up_to_its_first_text(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "serving_start.json"
    serving_start.main(["--model", str(model), *SIZE, "--starts", "1", "--json", str(file)])
    report = serving_start.StartReport.read(file)
    (row,) = report.rows
    assert row.start == "empty folder"
    assert row.fetched < 0.1 < row.listening, "a folder is not fetched, and a server takes a while"
    assert row.first_text > 0
    assert f"together {row.seconds:6.1f} s" in capsys.readouterr().out
    assert f"| empty folder | 0.0 | {row.listening:.1f} |" in serving_start.page(report, file)
