"""The quality benchmark: a small run of it, the pages made of it, and what it refuses."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest

import kvq_tools.cli
from kvq_tools.evaluation import measure_rows
from laboratory.quality import __main__ as quality
from laboratory.quality import bench
from laboratory.quality.comparison import Suite, listed, swept
from laboratory.quality.report import QualityReport, QualityRow

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"
TEXTS = [f"--{name}={PASSAGE}" for name in ("text", "calibration-text", "other-calibration-text")]
SIZES = ["--windows=3", "--window=96", "--prompt=0", "--samples=2", "--length=128"]
FILE = "quality_small.json"
SUITE = Suite(
    "A title",
    (
        listed("A", [("exact", "dense"), ("a scale for a token", "int4")]),
        listed(
            "B",
            [("two bits", "kvquant:bits=2"), ("a scale for a token", "int4")],
            "two bits",
            fake=True,
        ),
        swept(
            "C", "w_recent", [("KIVI", [(str(n), f"kivi:recent={n},block=32") for n in (0, 32)])]
        ),
    ),
)


@pytest.fixture(scope="module")
def folder(shallow, tmp_path_factory):
    """Return the folder in which a small run with calibrations left its report."""
    folder = tmp_path_factory.mktemp("quality")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quality.SUITES, "innerq", lambda: SUITE)
        quality.main(["innerq", f"--model={shallow}", *TEXTS, *SIZES, f"--json={folder / FILE}"])
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return QualityReport.read(folder / FILE)


def only(report: QualityReport, table: str, *cells: str) -> QualityRow:
    (row,) = (row for row in report.of(table) if row.cells == cells)
    return row


def test_a_run_calibrates_and_measures(report):
    exact, coded = only(report, "A", "exact"), only(report, "B", "two bits")
    assert exact.kl == pytest.approx(0, abs=1e-5)
    assert coded.kl > 100 * abs(exact.kl) + 1e-3
    assert (
        only(report, "A", "a scale for a token").kl == only(report, "B", "a scale for a token").kl
    )
    assert coded.outlier_fraction == (2.25 * 2 + 2) / 2 / 128, (
        "keys have 2.25 times the slots of values"
    )
    assert coded.cache_bytes < exact.cache_bytes
    assert coded.dropped.keys() == {"k", "v"}
    assert coded.dropped["v"] == 0 <= coded.dropped["k"] < 0.5
    assert exact.dropped == {}
    assert str(PASSAGE.parent) not in report.command, (
        "a result names files, not a machine's folders"
    )


def test_means_are_those_of_the_windows_and_lie_in_their_intervals(report):
    for row in report.rows:
        assert len(row.window_kl) == len(row.window_nats) == 3
        assert row.kl == pytest.approx(np.mean(row.window_kl), rel=1e-6)
        low, high = row.kl_interval
        assert math.isnan(low) or low <= row.kl <= high
        assert row.perplexity_interval.low <= row.perplexity <= row.perplexity_interval.high
    coded = only(report, "B", "two bits")
    assert coded.kl_interval.low < 0.999 * coded.kl, (
        "an interval of windows that differ has a width"
    )


def test_a_simulation_stands_beside_the_cache(report):
    (fake,) = (row for row in report.of("B", fake=True) if row.cells == ("two bits",))
    decoded = only(report, "B", "two bits")
    assert fake.tokens == decoded.tokens
    assert fake.kl > 1.01 * decoded.kl, (
        "a cache keeps its newest tokens in full precision, the simulation quantizes all"
    )


def test_a_table_that_is_not_there_costs_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(quality.SUITES, "innerq", lambda: SUITE)
    (file := tmp_path / FILE).write_text("the rows of a long run")
    with pytest.raises(SystemExit):
        quality.main(["innerq", *TEXTS, *SIZES, f"--json={file}", "--only=no such table"])
    assert capsys.readouterr().err == "no title contains --only 'no such table': A; B; C\n"
    assert file.read_text() == "the rows of a long run"


def test_a_stopped_run_goes_on_where_it_was(shallow, tmp_path, monkeypatch):
    file = tmp_path / "quality.json"
    command = ["innerq", f"--model={shallow}", *TEXTS, *SIZES, f"--json={file}"]
    suite = Suite("A title", (listed("A", [(bits, f"int{bits}") for bits in "2348"]),))
    monkeypatch.setitem(quality.SUITES, "innerq", lambda: suite)
    monkeypatch.setattr(bench, "TOGETHER", 1)
    measured = []

    def until_the_third(candidates, *args, **kwargs):
        measured.extend(str(spec) for _, spec in candidates)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure_rows(candidates, *args, **kwargs)

    monkeypatch.setattr(bench, "measure_rows", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        quality.main(command)
    assert not file.exists()
    (journal,) = tmp_path.glob("*/*.jsonl")
    journal.write_text(journal.read_text() + '{"key": "a line that a kill cut')
    quality.main(command)
    assert measured == ["int2", "int3", "int4", "int4", "int8"]
    assert [row.cache for row in QualityReport.read(file).rows] == ["int2", "int3", "int4", "int8"]
    assert list(tmp_path.iterdir()) == [file], "a complete run leaves its report alone"
