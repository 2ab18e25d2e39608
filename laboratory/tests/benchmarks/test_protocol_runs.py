"""Runs of the protocol: both readings score the same tokens, and runs go on where they were."""

from __future__ import annotations

import pytest

from benchmarks.protocol import __main__ as protocol
from benchmarks.protocol.report import ProtocolReport
from kvq_tools.evaluation.protocol import MAX_EXACT, READINGS

SMALL = [
    "--text=passage",
    "--contexts=96",
    "--scored=16",
    "--windows=2",
    "--caches",
    "dense",
    "int2",
]


@pytest.fixture(scope="module")
def file(shallow, tmp_path_factory):
    """Return the file of a small run that was stopped after its first rows and went on."""
    file = tmp_path_factory.mktemp("protocol") / "protocol_small.json"
    command = [str(shallow), *SMALL, f"--json={file}"]
    protocol.main([*command, "--hours=0"])
    assert not file.exists(), "no time for a row"
    protocol.main([*command, "--readings", "prompt"])
    first = ProtocolReport.read(file).rows
    protocol.main(command)
    assert ProtocolReport.read(file).rows[: len(first)] == first, "rows are not measured again"
    return file


@pytest.fixture(scope="module")
def report(file):
    return ProtocolReport.read(file)


def test_both_readings_score_the_same_tokens_and_decoding_adds_errors(report):
    assert [(row.cache, row.reading) for row in report.rows] == [
        (cache, reading) for reading in READINGS for cache in ("dense", "int2")
    ]
    exact, coarse = report.row("dense", 96, "prompt"), report.row("int2", 96, "prompt")
    decoded = report.row("int2", 96, "decoded")
    assert report.kl(exact).value < 1e-6 < 1e-3 < report.kl(coarse).value
    assert decoded.measured.over(coarse.measured, report.headline).value > 1
    again = report.row("dense", 96, "decoded")
    assert again.measured.window_nats == pytest.approx(exact.measured.window_nats, rel=1e-5)
    assert decoded.exact_share == coarse.exact_share > MAX_EXACT
    assert coarse.measured.rounding < 0.05


def test_rows_of_another_run_are_refused(shallow, file, capsys):
    with pytest.raises(SystemExit):
        protocol.main([str(shallow), *SMALL, "--windows=3", f"--json={file}"])
    assert "holds rows of another run (windows)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        protocol.main([str(shallow), "--text=novel", f"--json={file}"])
    assert "'novel' is not a text: write DOMAIN=FILE" in capsys.readouterr().err
