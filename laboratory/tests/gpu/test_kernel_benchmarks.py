"""The benchmark of kernels as far as a CPU can show: it runs with interpreted kernels, keeps
failures as rows, and resumes."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import jax.numpy as jnp
import pytest

from benchmarks.cpu.timing import Shape
from benchmarks.gpu import kernels, quantize_candidates, timed_case
from benchmarks.gpu.attention_candidates import Planned, attention_tasks
from benchmarks.gpu.compiling import compiled_first
from benchmarks.gpu.device_timing import Timing
from benchmarks.gpu.plans import Case
from benchmarks.gpu.report import GpuReport, KernelRow
from pallas_kernels.launch import Launch

TIMING = Timing(
    samples=2, seconds=0, max_copies=1, copy_bytes=1 << 20
)  # each copy is another call to compile
INTERPRETED = (Launch(interpret=True),)
MODEL = "Llama-3.2-1B"
CASES = (
    Case("attention", MODEL, Shape(2, 256, 64, 2, 2)),
    Case("quantize", MODEL, Shape(1, 512, 64, 1, 1)),
)


def empty() -> GpuReport:
    return GpuReport.here("Kernels of a test", ("benchmarks.gpu.kernels",))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> GpuReport:
    """Return the report of the benchmark at tiny shapes."""
    made = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_candidates, "SCHEMES", ("asym",))
        kernels.run(
            CASES,
            empty(),
            made / "kernels_cpu.json",
            TIMING,
            launches=INTERPRETED,
            specs=("dense", "kivi:bits=2"),
            threads=2,
        )
    return GpuReport.read(made / "kernels_cpu.json")


def test_every_candidate_has_a_row_with_a_time_and_an_error_or_the_reason_why_not(
    report: GpuReport,
):
    expected = {("bandwidth", "copy"), ("bandwidth", "read")}
    expected |= {
        ("attention", task.candidate)
        for task in attention_tasks(CASES[0].shape, INTERPRETED, ("dense", "kivi:bits=2"))
    }
    expected |= {("quantize", "asym, keys"), ("quantize", "asym, values")}
    assert {(row.section, row.candidate) for row in report.rows} == expected
    assert report.running == []
    assert report.skipped == []
    for row in report.rows:
        if "cuDNN" in row.candidate:
            assert row.failure.startswith("RuntimeError: cuDNN"), row
            assert row.samples_ms == ()
            continue
        assert row.failure == "", row
        assert len(row.samples_ms) == 2, row
        assert row.moved_bytes > 0, row
        if row.section != "bandwidth":
            assert row.error is not None, row
            assert row.error < 1e-2, row
        if row.section != "bandwidth":
            assert report.share(row) is not None, row


def test_ratios_are_to_the_fastest_exact_candidate_of_the_shape(report: GpuReport):
    found = {
        row.candidate: row for row in report.rows if row.section == "attention" and row.samples_ms
    }
    fastest = min(found["XLA bf16"].median_ms, found["dense"].median_ms)
    assert report.ratio(found["kivi:bits=2"]) == pytest.approx(
        found["kivi:bits=2"].median_ms / fastest
    )
    assert found["kivi:bits=2"].moved_bytes / found["dense"].moved_bytes == pytest.approx(3 / 16)
    assert found["kivi:bits=2"].idle_ms is not None
    assert found["XLA bf16"].idle_ms is None


def test_an_error_that_rounding_does_not_explain_is_named(report: GpuReport):
    assert report.wrong() == []
    good = next(
        row for row in report.rows if (row.section, row.candidate) == ("attention", "kivi:bits=2")
    )
    for bad in (
        dataclasses.replace(good, error=1.0),
        dataclasses.replace(good, error=math.nan),
        dataclasses.replace(good, failure="no"),
    ):
        assert dataclasses.replace(report, rows=[good, bad]).wrong() == [
            f"attention, {MODEL}, 256 tokens x 2, kivi:bits=2 (interpreted): {bad.wrong}"
        ]
    others = dataclasses.replace(
        good, candidate="cuDNN bf16", arithmetic="", failure="no cuDNN", error=None
    )
    assert dataclasses.replace(report, rows=[others]).wrong() == [], (
        "what others' code cannot do is not ours"
    )


def test_what_fails_becomes_a_row_and_the_others_go_on(tmp_path: pathlib.Path):
    def unfit():
        raise ValueError("head_dim 80\nand more")

    good = attention_tasks(CASES[0].shape, INTERPRETED, ())[0]
    broken = dataclasses.replace(
        good.make(), calls=(("asm", lambda x, copy: jnp.zeros(3) @ jnp.zeros(4)),)
    )
    tasks = [
        Planned("attention", "unfit", unfit),
        Planned("attention", "broken", lambda: broken),
        good,
    ]
    report = empty()
    entries = timed_case.entries_of(MODEL, CASES[0].shape, tasks)
    late = timed_case.run_entries(
        entries, report, lambda: report.write(tmp_path / "rows.json"), TIMING, threads=2
    )
    assert late == []
    found = {row.candidate: row for row in GpuReport.read(tmp_path / "rows.json").rows}
    unfit_row, broken_row, good_row = (found[task.candidate] for task in tasks)
    assert unfit_row.failure == "ValueError: head_dim 80"
    assert broken_row.failure.startswith("TypeError")
    assert broken_row.arithmetic == "asm"
    assert good_row.failure == ""
    assert good_row.samples_ms


def test_a_resumed_run_repeats_nothing_and_names_what_ended_the_last(
    tmp_path: pathlib.Path, report: GpuReport
):
    done = dataclasses.replace(
        report,
        rows=list(report.rows),
        skipped=[],
        running=[KernelRow("attention", MODEL, CASES[0].shape, "culprit")],
    )
    rows = len(done.rows)
    kernels.run(
        CASES[:1],
        done,
        tmp_path / "rows.json",
        TIMING,
        launches=INTERPRETED,
        specs=("dense", "kivi:bits=2"),
    )
    assert len(done.rows) == rows + 1
    assert done.rows[-1].candidate == "culprit"
    assert "process ended" in done.rows[-1].failure
    with pytest.raises(ValueError, match="cannot resume: device was 'another'"):
        empty().resumed(dataclasses.replace(empty(), device="another"))


@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_of_a_batch_is_handed_on_while_another_of_it_is_compiled(threads: int):
    events: list[tuple[str, int]] = []

    def compiled(item: int) -> int:
        events.append(("compiled", item))
        return -item

    for item, result in compiled_first(compiled, [("a", [1, 2, 3]), ("b", [4, 5])], threads):
        assert result == -item
        events.append(("timed", item))
    kinds = "".join(kind[0] for kind, _ in events)
    assert kinds == "ccctttcctt", events
    assert {item for _, item in events[:3]} == {1, 2, 3}
