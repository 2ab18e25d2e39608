"""The benchmark of whole decode steps, at a tiny size: what it times by default, in which order,
and what it does with slow programs."""

from __future__ import annotations

import pathlib

from benchmarks.gpu import decode_step
from benchmarks.gpu.device_timing import Timing
from benchmarks.gpu.random_model import TINY, random_llama
from benchmarks.gpu.report import GpuReport
from pallas_kernels.mosaic import route

TIMING = Timing(samples=2, seconds=0, max_copies=2, copy_bytes=1 << 20)
CACHES = ("dense", "kivi:bits=4")


def report_of(file: pathlib.Path, names: tuple[str, ...] | None) -> GpuReport:
    report = GpuReport.here("Steps of a test", ("benchmarks.gpu.decode_step",))
    decode_step.run([(256, 2)], CACHES, names, random_llama(TINY), report, file, TIMING)
    return GpuReport.read(file)


def test_kernels_are_timed_before_xla_and_compared_with_it(tmp_path: pathlib.Path):
    report = report_of(tmp_path / "rows.json", ("xla", "interpreted"))
    rows = report.rows
    assert [(row.candidate, row.arithmetic) for row in rows] == [
        (spec, name) for name in ("interpreted", "xla") for spec in CACHES
    ]
    for row in rows:
        assert row.failure == "", row
        assert len(row.samples_ms) == 2, row
        assert row.remark == ""
        if row.arithmetic == "xla":
            assert row.error is None, "it is what the others are compared with"
        else:
            assert row.error is not None
            assert 0 < row.error < row.max_error < 0.05, row
    [trace] = report.traces
    assert trace.what == "kivi:bits=4 (interpreted), batch 2, 256 tokens"
    assert sum(kernel.us for kernel in trace.kernels) > 0
    assert not report.running


def test_what_users_get_by_default_is_timed_where_it_shows_most():
    assert decode_step.POINTS[0] == (32768, 16)
    assert {batch for _, batch in decode_step.POINTS} == {1, 16, 64}
    assert any(
        "xla" in decode_step.usual_implementations(*point) for point in decode_step.POINTS
    ), "no error is known"
    default = "asm" if route.missing() else "mosaic"
    assert {"asm", default} <= set(decode_step.usual_implementations(*decode_step.POINTS[0]))
    for point in decode_step.POINTS:
        assert default in decode_step.usual_implementations(*point)
        assert set(decode_step.usual_implementations(*point)) <= set(decode_step.IMPLEMENTATIONS)
