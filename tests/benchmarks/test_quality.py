"""The quality benchmark: a small run of it, and what it refuses."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import quality, tables
from benchmarks.quality import Candidate, QualityReport

PASSAGE = pathlib.Path(quality.__file__).parents[1] / "models" / "cli" / "passage.txt"
TEXTS = [f"--{name}={PASSAGE}" for name in ("text", "calibration-text", "other-calibration-text")]


def test_a_run_calibrates_measures_and_makes_a_table(tmp_path, monkeypatch):
    chosen = [Candidate("A", "exact", "dense"), Candidate("A", "two bits", "kvquant:bits=2"), Candidate("B", "again", "kvquant:bits=2")]
    monkeypatch.setitem(quality.SUITES, "kvquant", ("A title", lambda: iter(chosen)))
    file = tmp_path / "quality_test.json"
    quality.main(["kvquant", *TEXTS, "--windows=2", "--window=96", "--samples=2", "--length=128", f"--json={file}"])
    report = QualityReport.read(file)
    exact, coded, again = report.rows
    assert exact.kl == pytest.approx(0, abs=1e-5)
    assert coded.kl > 100 * abs(exact.kl) + 1e-3
    assert (again.kl, again.table) == (coded.kl, "B")
    assert coded.outlier_fraction == 2 / 128
    assert str(PASSAGE.parent) not in report.command, "a result names files, not a machine's folders"
    assert "### B" in tables.render(tmp_path)


def test_a_text_that_is_too_short_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        quality.main(["kvquant", *TEXTS, "--windows=1000", f"--json={tmp_path / 'none.json'}"])
    assert stopped.value.code == 2
    assert "fewer than 1000 windows" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_every_cache_of_the_tables_is_a_cache():
    for _, candidates in quality.SUITES.values():
        for candidate in candidates():
            quality.kvq.parse(candidate.cache)
