"""The benchmark of the server counts what was done, and the sequences that fit are those that
`engine_size` counts."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import serving, serving_report

CACHE = "kivi:bits=2,recent=8,block=32"


def test_a_report_tells_every_request(
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    file = tmp_path / "serving.json"
    sizes = [
        "--requests",
        "5",
        "--repeats",
        "1",
        "--lengths",
        *("4", "12", "3", "6"),
        "--capacity",
        "64",
        "--memory",
        "0.001",
        "--prefix",
        "64",
    ]
    caches = ["--cache", "dense", CACHE, "--timed", CACHE]
    page = serving_report.page

    def once_written(report: serving_report.ServingReport, path: pathlib.Path) -> str:
        assert serving_report.ServingReport.read(file) == report
        return page(report, path)

    monkeypatch.setattr(serving, "page", once_written)
    serving.main(["--model", str(model), *caches, "--slots", "2", *sizes, "--json", str(file)])
    report = serving_report.ServingReport.read(file)
    new = sum(request.max_new_tokens for request in serving.requests_of(5, (4, 12, 3, 6), 300))
    assert [(row.slots, row.requests, row.new_tokens) for row in report.rows] == [
        (0, 5, new),
        (2, 5, new),
    ]
    for row in report.rows:
        assert len(row.first_token) == 5
        assert 0 < min(row.first_token) <= max(row.first_token) <= row.seconds
        assert list(row.first_token) == sorted(row.first_token), (
            "requests are answered in another order than they came"
        )
    assert [row.cache for row in report.room] == ["dense", CACHE]
    alone, two = (row.cache_bytes for row in report.rows)
    assert two == 3 * alone
    text = capsys.readouterr().out
    assert text.strip() == serving_report.page(report, file)
    assert f"{report.rows[1].requests_per_second:.3f}" in text
    (prefix,) = report.prefixes
    assert (prefix.cache, prefix.tokens) == (CACHE, 64)
    assert min(prefix.read, prefix.memory, prefix.disk, prefix.bytes) > 0
    shown = serving_report.page(report, file)
    assert "| from files in the page cache |" in shown
    work = f"| `{CACHE}` | float32 | 4-12, 3-6 |"
    assert f"{work} one at a time | {report.rows[0].requests_per_second:.3f} |" in shown
    assert f"| `{CACHE}` | 64 | {prefix.read:.2f} s |" in shown
