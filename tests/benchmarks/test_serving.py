"""The benchmark of the server counts what was done, and the sequences that fit are those that a
budget finds."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from benchmarks import serving, serving_report, serving_start
from benchmarks.report_file import RESULTS
from kvq_models.inference.engine.budget import plan
from tests.kvq_models.checkpoints import tiny_config

CACHE = "kivi:bits=2,recent=8,block=32"


def test_a_report_tells_every_request(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "serving.json"
    sizes = [
        "--requests",
        "5",
        "--prompt",
        "4",
        "12",
        "--new",
        "3",
        "6",
        "--capacity",
        "64",
        "--memory",
        "0.001",
        "--prefix",
        "64",
    ]
    caches = ["--cache", "dense", CACHE, "--timed", CACHE]
    serving.main(["--model", str(model), *caches, "--slots", "2", *sizes, "--json", str(file)])
    report = serving_report.ServingReport.read(file)
    new = sum(request.max_new_tokens for request in serving.requests_of(5, (4, 12), (3, 6), 300))
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
    assert text.splitlines() == serving_report.lines_of(report)
    assert f"{report.rows[1].requests_per_second:.3f}" in text
    (prefix,) = report.prefixes
    assert (prefix.cache, prefix.tokens) == (CACHE, 64)
    assert min(prefix.read, prefix.memory, prefix.disk, prefix.bytes) > 0
    shown = serving_report.page(report, file)
    assert f"| `{CACHE}` | one at a time | {report.rows[0].requests_per_second:.3f} |" in shown
    assert f"| `{CACHE}` | 64 | {prefix.read:.2f} s |" in shown


def test_the_sequences_that_fit_are_those_of_a_budget():
    config, found = tiny_config(max_position_embeddings=640), {}
    for cache in ("dense", "kivi:bits=4", "kivi:bits=2"):
        memory = plan("dense", config, slots=9, capacity=640, dtype="bfloat16").nbytes
        row = serving.room_of(cache, config, 640, memory)
        assert plan(cache, config, memory=memory, dtype="bfloat16").slots == row.sequences
        assert (
            plan(cache, config, slots=row.sequences + 1, capacity=640, dtype="bfloat16").nbytes
            > memory
        )
        found[cache] = row.sequences
    assert found["dense"] == 9
    assert found["dense"] < found["kivi:bits=4"] < found["kivi:bits=2"]
    assert serving.room_of("dense", config, 640, 100).sequences == 0


def test_the_numbers_of_the_page_are_those_of_the_results():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    report, start = (
        serving_report.ServingReport.read(RESULTS / "serving.json"),
        serving_start.StartReport.read(RESULTS / "serving_start.json"),
    )
    alone, slots = (
        next(row for row in report.rows if row.slots == n and row.cache == "kivi:bits=4")
        for n in (serving_report.ALONE, 8)
    )
    prefix = next(row for row in report.prefixes if row.cache == "kivi:bits=4")
    first, again = start.rows
    for told in (
        f"{alone.seconds / slots.seconds:.2f}",
        f"{np.median(slots.first_token):.1f} s; {np.median(alone.first_token):.1f} s",
        "; ".join(str(row.sequences) for row in report.room),
        f"{prefix.read:.1f} s; {prefix.memory:.2f} s; {prefix.disk:.2f} s",
        f"{first.seconds:.0f} s; {again.seconds:.0f} s",
    ):
        assert f"| {told} |" in page, told
