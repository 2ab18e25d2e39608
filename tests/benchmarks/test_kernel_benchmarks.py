"""The GPU benchmarks as far as a CPU can show: they run with interpreted kernels, keep what fails as rows, resume, and become tables."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    kernel_candidates,
    kernel_run,
    kernels,
    kvquant_candidates,
    paper_tables,
    plots,
    polarquant_candidates,
    product_candidates,
    step,
    tables,
)
from benchmarks.common import Shape
from benchmarks.device_timing import Timing, random_words, timing_loop, uniform
from benchmarks.kernel_candidates import MODELS, SPECS, Planned, attention_tasks, shape_of
from benchmarks.kernel_report import KernelReport, KernelRow
from benchmarks.kernels import Case
from benchmarks.product_candidates import PAPER_MODELS, paper_shape, product_tasks, quantize_tasks
from models import LlamaConfig
from pallas_kernels._launch import Launch
from tests.pallas_kernels.lowering import lower_for_cuda

TIMING = Timing(samples=2, seconds=0, most_copies=2, copy_bytes=1 << 20)
INTERPRETED = (Launch(interpret=True),)
MODEL = "Llama-3.2-1B"
CASES = (
    Case("attention", MODEL, Shape(2, 256, 64, 2, 2)),
    Case("products", MODEL, Shape(1, 512, 64, 1, 1)),
    Case("quantize", MODEL, Shape(1, 512, 64, 1, 1)),
    Case("kvquant", "Llama-2-7B", Shape(1, 2048, 64, 2, 1)),
    Case("polarquant", "Llama-3.1-8B", Shape(1, 4096, 64, 2, 1)),
)
TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=4096,
)


def empty() -> KernelReport:
    return KernelReport.here("Kernels of a test", ("benchmarks.kernels",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Results of both benchmarks at tiny shapes."""
    made = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_candidates, "SCHEMES", ("asym",))
        kernels.run(
            CASES,
            empty(),
            made / "kernels_cpu.json",
            TIMING,
            hows=INTERPRETED,
            specs=("dense", "kivi:bits=2", "kvquant:bits=3,outliers=0.02"),
            threads=2,
        )
    report = KernelReport.here("Steps of a test", ("benchmarks.step",))
    step.run([(256, 2)], ("dense", "kivi:bits=4"), ("interpreted", "xla"), step.random_llama(TINY), report, made / "step_cpu.json", TIMING)
    return made


@pytest.fixture(scope="module")
def report(folder: pathlib.Path) -> KernelReport:
    return KernelReport.read(folder / "kernels_cpu.json")


def test_every_candidate_has_a_row_with_a_time_and_an_error_or_the_reason_why_not(report: KernelReport):
    expected = {("bandwidth", "copy"), ("bandwidth", "read")}
    expected |= {("attention", task.candidate) for task in attention_tasks(CASES[0].shape, INTERPRETED, ("dense", "kivi:bits=2"))}
    expected |= {(task.section, task.candidate) for task in product_tasks(CASES[1].shape, INTERPRETED)}
    expected |= {("quantize", "asym, keys"), ("quantize", "asym, values"), ("attention", "kvquant:bits=3,outliers=0.02")}
    expected |= {(section, part) for section in kvquant_candidates.SECTIONS.values() for part in kvquant_candidates.PARTS}
    expected |= {(task.section, task.candidate) for task in polarquant_candidates.table_tasks(CASES[-1].shape, INTERPRETED)}
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
            assert report.share(row) is not None, row


def test_ratios_are_to_the_fastest_exact_candidate_of_the_shape(report: KernelReport):
    found = {row.candidate: row for row in report.rows if row.section == "attention" and row.samples_ms}
    fastest = min(found["XLA bf16"].median_ms, found["dense"].median_ms)
    assert report.ratio(found["kivi:bits=2"]) == pytest.approx(found["kivi:bits=2"].median_ms / fastest)
    assert found["kivi:bits=2"].moved_bytes / found["dense"].moved_bytes == pytest.approx(3 / 16)
    assert found["kivi:bits=2"].idle_ms is not None
    assert found["XLA bf16"].idle_ms is None


def test_the_reference_rejects_another_sequence_of_heads():
    """Negative control of the errors above."""
    task = attention_tasks(CASES[0].shape, INTERPRETED, ("dense",))[0].make()
    x, copy = task.start(), task.copy(jnp.uint32(1))
    out = task.calls[0][1](x, copy)
    assert kernel_run.relative_error(*task.check(x, copy, out)) < 1e-2
    assert kernel_run.relative_error(*task.check(x, copy, jnp.roll(out, 1, axis=1))) > 0.1


def test_reports_are_read_as_they_were_written(folder: pathlib.Path, tmp_path: pathlib.Path):
    for name in ("kernels_cpu", "step_cpu"):
        report = KernelReport.read(folder / f"{name}.json")
        report.write(tmp_path / "again.json")
        assert KernelReport.read(tmp_path / "again.json") == report


def test_tables_hold_the_measured_and_the_papers_numbers(folder: pathlib.Path, report: KernelReport):
    page = tables.render(folder)
    for row in report.rows:
        if row.section == "attention" and row.samples_ms:
            assert f"| {row.name} | {1e3 * row.median_ms:.1f} |" in page, row
    [inner] = [r for r in report.rows if r.section == "scores" and r.candidate == product_candidates.INNER]
    assert f"| {MODEL} | here, q K^T | inner | {inner.median_ms:.4f} |" in page
    assert "| Llama-3.1-8B | paper, RTX 4090 | torch.matmul | 0.036 |" in page
    assert "| Key | 2048 | paper, A6000 | 33.3 | 4.5 | 13.0 | 8.1 | 25.6 |" in page
    parts = [next(r for r in report.rows if (r.section, r.candidate) == ("kvquant values", part)) for part in kvquant_candidates.PARTS]
    times = [1e3 * row.median_ms / (32 if row.candidate == "packing" else 1) for row in parts]
    assert f"| Value | 2048 | here, {report.device} | {' | '.join(f'{time:.1f}' for time in times)} |" in page
    assert "| PolarQuant | paper, A800 | 50.04 | 71.69 | 163.42 | 526.65 |" in page
    for row in report.rows:
        if row.section == polarquant_candidates.SECTION:
            assert f"| {row.candidate} | here, {report.device} | {1e3 * row.median_ms:.2f} |" in page, row
    for row in KernelReport.read(folder / "step_cpu.json").rows:
        assert row.failure == "", row
        assert f"| {row.name} | {row.median_ms:.3f} |" in page, row
        assert row.arithmetic == "xla" or (row.error is not None and row.error < 0.05), row


def test_a_page_without_times_of_kernels_says_that_none_was_run(folder: pathlib.Path, tmp_path: pathlib.Path):
    shutil.copy(folder / "step_cpu.json", tmp_path)
    assert "No kernel was run on a GPU yet" in tables.render(tmp_path)
    assert "No kernel was run on a GPU yet" not in tables.render(folder)


def test_plots_are_drawn(folder: pathlib.Path):
    plots.main(["--folder", str(folder)])
    for ending in ("png", "svg"):
        assert (folder / f"kernels_cpu_{MODEL.lower()}.{ending}").stat().st_size > 10_000


@pytest.mark.parametrize("threads", [1, 2])
def test_what_fails_becomes_a_row_and_the_others_go_on(tmp_path: pathlib.Path, threads: int):
    def unfit():
        raise ValueError("head_dim 80\nand more")

    good = attention_tasks(CASES[0].shape, INTERPRETED, ())[0]
    broken = dataclasses.replace(good.make(), calls=(("asm", lambda x, copy: jnp.zeros(3) @ jnp.zeros(4)),))
    tasks = [Planned("attention", "unfit", unfit), Planned("attention", "broken", lambda: broken), good]
    report = empty()
    kernel_run.run_case(MODEL, CASES[0].shape, tasks, report, lambda: report.write(tmp_path / "rows.json"), TIMING, threads)
    unfit_row, broken_row, good_row = KernelReport.read(tmp_path / "rows.json").rows
    assert unfit_row.failure == "ValueError: head_dim 80"
    assert broken_row.failure.startswith("TypeError")
    assert broken_row.arithmetic == "asm"
    assert good_row.failure == ""
    assert good_row.samples_ms


def test_a_resumed_run_repeats_nothing_and_names_what_ended_the_last(tmp_path: pathlib.Path, report: KernelReport):
    done = dataclasses.replace(report, rows=list(report.rows), running=[KernelRow("attention", MODEL, CASES[0].shape, "culprit")])
    rows = len(done.rows)
    kernels.run(CASES[:2], done, tmp_path / "rows.json", TIMING, hows=INTERPRETED, specs=("dense", "kivi:bits=2"))
    assert len(done.rows) == rows + 1
    assert done.rows[-1].candidate == "culprit"
    assert "process ended" in done.rows[-1].failure
    with pytest.raises(ValueError, match="cannot resume: device was 'another'"):
        empty().resumed(dataclasses.replace(empty(), device="another"))


def test_shapes_left_out_for_lack_of_time_are_named(tmp_path: pathlib.Path):
    report = empty()
    kernels.run(CASES[:2], report, tmp_path / "rows.json", TIMING, seconds=-1)
    assert KernelReport.read(tmp_path / "rows.json").skipped == [case.name for case in CASES[:2]]


@pytest.mark.parametrize("arithmetic", ["asm", "jnp"])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_candidates_lower_for_cuda(spec: str, arithmetic: str):
    task = attention_tasks(shape_of("Llama-3.1-8B", 4096, 1), (Launch(arithmetic),), (spec,))[-1]
    assert "decode_attention" in lowered(task)


@pytest.mark.parametrize("arithmetic", ["asm", "jnp"])
def test_kvquant_candidates_lower_for_cuda(arithmetic: str):
    shape, how = shape_of("Llama-3.1-8B", 4096, 1), (Launch(arithmetic),)
    for task in kvquant_candidates.attention_tasks(shape, how, kvquant_candidates.ATTENTION_SPECS):
        assert "decode_attention" in lowered(task), task.candidate
    for task in kvquant_candidates.table_tasks(shape_of("Llama-2-7B", 2048, 1), how):
        assert ("matvec" in lowered(task)) == (task.candidate in ("dense", "total")), task.candidate


@pytest.mark.parametrize("arithmetic", ["asm", "jnp"])
def test_polarquant_candidates_lower_for_cuda(arithmetic: str):
    for task in polarquant_candidates.table_tasks(paper_shape("Llama-3.1-8B", 4096), (Launch(arithmetic),)):
        assert ("matvec_scores" in lowered(task)) == (task.candidate != product_candidates.EXACT), task.candidate


def test_kvquants_times_are_typed_as_printed():
    """The paper's total is the sum of its parts, each rounded."""
    for parts in paper_tables.TABLE_22.values():
        for packing, dense, sparse, total in zip(*(parts[name] for name in ("packing", "dense", "sparse", "total")), strict=True):
            assert packing + dense + sparse == pytest.approx(total, abs=0.25)


PLANNED = [
    *(task for task in attention_tasks(shape_of("Llama-2-7B", 4096, 1), (), ()) if "cuDNN" not in task.candidate),
    *product_tasks(paper_shape("Llama-3.1-8B", 4096), (Launch("asm"),)),
    *quantize_tasks(paper_shape("Llama-3.1-8B", 4096), (Launch("asm"),)),
]


@pytest.mark.parametrize("planned", PLANNED, ids=lambda planned: f"{planned.section}: {planned.candidate}")
def test_other_candidates_lower_for_cuda(planned: Planned):
    text = lowered(planned)
    assert ("triton" in text) == (planned.section != "attention" and planned.candidate != product_candidates.EXACT)


def lowered(planned: Planned) -> str:
    task = planned.make()
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, kernel_run.SEED)
    [(_, call)] = task.calls
    return lower_for_cuda(timing_loop(call, task.feed, 2), x, [copy] * 2)


def test_the_usual_cases_cover_the_shape_table():
    cases = kernels.default_cases()
    for model in MODELS:
        found = [(case.shape.tokens, case.shape.batch) for case in cases if (case.section, case.model) == ("attention", model)]
        assert sorted(found) == [(512 << i, batch) for i in range(9) for batch in (1, 16)], model
    assert {case.model for case in cases[:6]} == {"Llama-3.1-8B"}, "a run that ends early has the most important model"
    for model in PAPER_MODELS:
        assert {c.shape.tokens for c in cases if (c.section, c.model) == ("products", model)} == set(paper_tables.LENGTHS)
    assert len({case.name for case in cases}) == len(cases)


def test_the_command_ends_with_the_papers_tables_and_what_it_left_out(
    report: KernelReport, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(cases, into: KernelReport, path, timing, **_) -> None:
        into.rows, into.skipped = report.rows, ["attention, of no time"]

    monkeypatch.setattr(kernels, "run", run)
    kernels.main(["--json", str(tmp_path / "rows.json"), "--interpret"])
    printed = capsys.readouterr()
    for title in ("InnerQ's Table 3", "InnerQ's Table 4", "InnerQ's Figure 4", "KVQuant's Table 22", "PolarQuant's Table 4"):
        assert f"### {title}" in printed.out
    [inner] = [r for r in report.rows if r.section == "scores" and r.candidate == product_candidates.INNER]
    assert f"| {MODEL} | here, q K^T | inner | {inner.median_ms:.4f} |" in printed.out
    assert "1 shapes left out for lack of time\nleft out: attention, of no time" in printed.err


@pytest.mark.parametrize("group", [1, 4])
def test_a_split_batch_for_cudnn_attends_as_one_sequence_does(group: int, monkeypatch: pytest.MonkeyPatch):
    """With XLA's attention in cuDNN's place, which gives the logarithms of sums that the merge needs."""
    attend = jax.nn.dot_product_attention

    def by_xla(*args, implementation: str, **options):
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return attend(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 3, group, 64)) * 2, jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 512, 3, 64)), jnp.bfloat16) for _ in range(2))
    split = np.asarray(jax.jit(lambda *a: kernel_candidates._cudnn_split(4, *a))(q, k, v))
    wanted = np.asarray(kernel_candidates._cudnn(q, k, v))
    errors = np.linalg.norm(split - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert errors.max() < 4e-2, "bf16 rounds the logits of both"
    first = np.asarray(kernel_candidates._cudnn(q, k[:, :128], v[:, :128]))
    assert (np.linalg.norm(first - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).min() > 0.2, "the first run alone would pass"


@pytest.mark.parametrize("shape", ["Llama-3.1-8B", "Llama-9:512:1", "Llama-3.1-8B:512:0"])
def test_unknown_shapes_are_refused(shape: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        kernels.main(["--json", "none.json", "--shapes", shape])
    assert stop.value.code == 2
    assert "write MODEL:TOKENS:BATCH" in capsys.readouterr().err


@pytest.mark.parametrize("main", [kernels.main, step.main])
def test_a_process_without_a_gpu_is_refused(main, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--json", "none.json"])
    assert stop.value.code == 2
    assert "GPU" in capsys.readouterr().err


# as the paper prints them, in percent, at 2048 tokens and more
SPEEDUPS = {
    "TABLE_3": {
        "Llama-3.2-1B": (76.00, 78.67, 85.10, 87.87, 88.51, 88.53, 88.41),
        "Llama-3.1-8B": (78.50, 84.92, 87.85, 88.50, 88.53, 88.41, 88.53),
        "Llama-2-13B": (81.07, 85.77, 87.73, 88.48, 88.32, 88.41, 88.54),
    },
    "TABLE_4": {
        "Llama-3.2-1B": (14.21, 19.02, 21.15, 22.16, 22.14, 22.16, 22.87),
        "Llama-3.1-8B": (15.23, 19.50, 21.74, 22.04, 22.41, 22.86, 22.54),
        "Llama-2-13B": (18.35, 21.13, 22.41, 22.15, 22.47, 22.79, 22.32),
    },
}


@pytest.mark.parametrize("name", SPEEDUPS)
def test_the_papers_times_are_typed_as_printed(name: str):
    """Their quotients are the speedups that the paper prints beside them, as far as three decimals of a millisecond go."""
    for model, printed in SPEEDUPS[name].items():
        other, inner = (times[2:] for times in getattr(paper_tables, name)[model])
        for i, speedup in enumerate(printed):
            assert 100 * (1 - inner[i] / other[i]) == pytest.approx(speedup, abs=100 * 0.001 / other[i] + 0.01), (model, i)


def test_random_contents_have_no_pattern_and_differ_by_seed():
    words = [random_words((4, 1000), jnp.uint32(seed)) for seed in (1, 2)]
    assert len(set(words[0].reshape(-1).tolist())) > 3800
    assert (words[0] == words[1]).mean() < 0.01
    numbers = uniform((100, 100), jnp.uint32(3), -2.0, 2.0)
    assert abs(float(numbers.mean())) < 0.05
    assert float(numbers.min()) >= -2
    assert float(numbers.max()) <= 2
    assert abs(float(jnp.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1])) < 0.3


def test_enough_copies_are_rotated_to_leave_the_cache():
    timing = Timing()
    assert timing.copies(30_000_000) == 4
    assert timing.is_cold(30_000_000)
    assert timing.copies(1 << 30) == 1
    assert timing.is_cold(1 << 30)
    assert timing.copies(1000) == timing.most_copies
    assert not timing.is_cold(1000)
