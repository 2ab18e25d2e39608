"""The GPU benchmarks as far as a CPU can show: they run with interpreted kernels, keep failures as
rows, resume, and become tables."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from benchmarks import results_page
from benchmarks.cpu.timing import Shape
from benchmarks.gpu import decode_step, kernels, plots, quantize_candidates, timed_case
from benchmarks.gpu.attention_candidates import Planned, attention_tasks
from benchmarks.gpu.device_timing import Timing
from benchmarks.gpu.page import KERNEL_HEADER, kernel_line
from benchmarks.gpu.plans import Case
from benchmarks.gpu.random_model import TINY, random_llama
from benchmarks.gpu.report import GpuReport, KernelRow
from pallas_kernels.launch import Launch

TIMING = Timing(
    samples=2, seconds=0, most_copies=1, copy_bytes=1 << 20
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Results of both benchmarks at tiny shapes."""
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
    report = GpuReport.here("Steps of a test", ("benchmarks.gpu.decode_step",))
    decode_step.run(
        [(256, 2)],
        ("dense",),
        ("interpreted", "xla"),
        random_llama(TINY),
        report,
        made / "step_cpu.json",
        TIMING,
    )
    return made


@pytest.fixture(scope="module")
def report(folder: pathlib.Path) -> GpuReport:
    return GpuReport.read(folder / "kernels_cpu.json")


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


def test_the_reference_rejects_another_sequence_of_heads():
    """Negative control of the errors above."""
    task = attention_tasks(CASES[0].shape, INTERPRETED, ("dense",))[0].make()
    x, copy = task.start(), task.copy(jnp.uint32(1))
    out = task.calls[0][1](x, copy)
    assert task.check is not None
    assert timed_case.relative_error(*task.check(x, copy, out)) < 1e-2
    assert timed_case.relative_error(*task.check(x, copy, jnp.roll(out, 1, axis=1))) > 0.1


def test_reports_are_read_as_they_were_written(folder: pathlib.Path, tmp_path: pathlib.Path):
    for name in ("kernels_cpu", "step_cpu"):
        report = GpuReport.read(folder / f"{name}.json")
        report.write(tmp_path / "again.json")
        assert GpuReport.read(tmp_path / "again.json") == report


def test_tables_hold_the_measured_numbers(folder: pathlib.Path, report: GpuReport):
    pages = results_page.render(folder)
    for row in report.rows:
        if row.section != "bandwidth" and row.samples_ms:
            line = f"| {row.name} | {1e3 * row.median_ms:.1f} |"
            assert line in pages["kernels_cpu.md"], row
    for row in GpuReport.read(folder / "step_cpu.json").rows:
        assert f"| {row.name} | {row.median_ms:.3f} |" in pages["step_cpu.md"], row


def row_of_table(row: KernelRow) -> dict[str, str]:
    """Return the cells of a row in a table of attention, by their headers."""
    return dict(zip(KERNEL_HEADER, kernel_line(empty(), row), strict=True))


def test_rows_say_what_a_reader_must_know_of_them():
    row = KernelRow(
        "attention",
        MODEL,
        CASES[0].shape,
        "dense",
        "jnp",
        moved_bytes=1000,
        cold=True,
        samples_ms=(1.0, 1.0),
        error=1e-3,
    )
    assert row_of_table(row)["remarks"] == ""
    assert row_of_table(row)["error"] == "1.0e-03"
    assert row_of_table(dataclasses.replace(row, error=None))["error"] == "-"
    assert (
        row_of_table(dataclasses.replace(row, error=None, failure="ValueError: no"))["error"] == ""
    )
    assert row_of_table(dataclasses.replace(row, idle_ms=0.4))["remarks"] == ""
    assert row_of_table(dataclasses.replace(row, idle_ms=0.6))["remarks"] == "mostly launches"
    changed = dataclasses.replace(
        row, idle_ms=0.6, cold=False, remark="inexact", failure="ValueError: no"
    )
    assert (
        row_of_table(changed)["remarks"]
        == "partly from L2; mostly launches; inexact; ValueError: no"
    )


def test_each_page_says_how_its_times_were_taken(folder: pathlib.Path):
    pages = results_page.render(folder)
    assert "timed in turn" not in pages[results_page.INDEX]
    for name, title in (
        ("kernels_cpu.md", "Kernels of a test"),
        ("step_cpu.md", "Steps of a test"),
    ):
        assert pages[name].startswith(f"# {title}\n")
        assert "timed one after another" in pages[name]
        assert "divides two medians" in pages[name]
        assert "a ratio is the median over rounds" not in pages[name]


def test_a_page_without_times_of_kernels_says_that_none_was_run(
    folder: pathlib.Path, tmp_path: pathlib.Path
):
    shutil.copy(folder / "step_cpu.json", tmp_path)
    assert "No kernel was run on a GPU yet" in results_page.render(tmp_path)[results_page.INDEX]
    assert "No kernel was run on a GPU yet" not in results_page.render(folder)[results_page.INDEX]


def test_plots_are_drawn(folder: pathlib.Path):
    plots.main(["--folder", str(folder)])
    for ending in ("png", "svg"):
        assert (folder / f"kernels_cpu_{MODEL.lower()}.{ending}").stat().st_size > 10_000


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


@pytest.mark.parametrize("threads", [1, 2])
def test_what_fails_becomes_a_row_and_the_others_go_on(tmp_path: pathlib.Path, threads: int):
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
        entries, report, lambda: report.write(tmp_path / "rows.json"), TIMING, threads
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


def test_shapes_left_out_for_lack_of_time_are_named(tmp_path: pathlib.Path):
    report = empty()
    kernels.run(CASES[:2], report, tmp_path / "rows.json", TIMING, seconds=-1)
    assert GpuReport.read(tmp_path / "rows.json").skipped == [case.name for case in CASES[:2]]


@pytest.mark.parametrize("shape", ["Llama-3.1-8B", "Llama-9:512:1", "Llama-3.1-8B:512:0"])
def test_unknown_shapes_are_refused(shape: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        kernels.main(["--json", "none.json", "--shapes", shape])
    assert stop.value.code == 2
    assert "write MODEL:TOKENS:BATCH" in capsys.readouterr().err


@pytest.mark.parametrize("main", [kernels.main, decode_step.main])
def test_a_process_without_a_gpu_is_refused(main, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--json", "none.json"])
    assert stop.value.code == 2
    assert "GPU" in capsys.readouterr().err
