"""The papers' tables of times, as far as a CPU can show: interpreted kernels, errors, and the
numbers that the papers print."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import pytest

from benchmarks.cpu.timing import Shape
from benchmarks.gpu import kernels, quantize_candidates, timed_case
from benchmarks.gpu.attention_candidates import Planned, shape_of
from benchmarks.gpu.device_timing import Timing, timing_loop
from benchmarks.gpu.report import GpuReport
from laboratory import results_page
from laboratory.gpu import (
    innerq_candidates,
    kvquant_candidates,
    paper_kernels,
    paper_tables,
    polarquant_candidates,
)
from laboratory.gpu.innerq_candidates import PAPER_MODELS, paper_shape, product_tasks
from laboratory.gpu.paper_kernels import PLANS, PaperCase
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.pallas_kernels.lowering import lower_for_cuda

TIMING = Timing(samples=2, seconds=0, max_copies=1, copy_bytes=1 << 20)
INTERPRETED = (Launch(interpret=True),)
MODEL = "Llama-3.2-1B"
CASES = (
    PaperCase("products", MODEL, Shape(1, 512, 64, 1, 1)),
    PaperCase("quantize", MODEL, Shape(1, 512, 64, 1, 1)),
    PaperCase("kvquant", "Llama-2-7B", Shape(1, 2048, 64, 2, 1)),
    PaperCase("polarquant", "Llama-3.1-8B", Shape(1, 4096, 64, 2, 1)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder with results at tiny shapes."""
    folder = tmp_path_factory.mktemp("results")
    report = GpuReport.here("Papers of a test", (paper_kernels.MODULE,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_candidates, "SCHEMES", ("asym",))
        kernels.run(
            CASES, report, folder / "papers_cpu.json", TIMING, launches=INTERPRETED, threads=2
        )
    return folder


@pytest.fixture(scope="module")
def report(folder: pathlib.Path) -> GpuReport:
    return GpuReport.read(folder / "papers_cpu.json")


def test_every_candidate_has_a_row_with_a_time_and_an_error(report: GpuReport):
    expected = {("bandwidth", "copy"), ("bandwidth", "read")}
    expected |= {("quantize", "asym, keys"), ("quantize", "asym, values")}
    for case in (CASES[0], *CASES[2:]):
        expected |= {(task.section, task.candidate) for task in case.tasks(INTERPRETED, ())}
    assert {(row.section, row.candidate) for row in report.rows} == expected
    for row in report.rows:
        assert row.failure == "", row
        assert len(row.samples_ms) == 2, row
        if row.candidate == "packing":
            assert row.error is None, "there is nothing to compare with"
        elif row.section != "bandwidth":
            assert row.error is not None, row
            assert row.error < 1e-2, row


def test_tables_hold_the_measured_and_the_papers_numbers(folder: pathlib.Path, report: GpuReport):
    page = results_page.render(folder)["papers_cpu.md"]
    [inner] = [
        r for r in report.rows if r.section == "scores" and r.candidate == innerq_candidates.INNER
    ]
    assert f"| {MODEL} | here, q K^T | inner | {inner.median_ms:.4f} |" in page
    assert "| Llama-3.1-8B | paper, RTX 4090 | torch.matmul | 0.036 |" in page
    assert "| Key | 2048 | paper, A6000 | 33.3 | 4.5 | 13.0 | 8.1 | 25.6 |" in page
    parts = [
        next(r for r in report.rows if (r.section, r.candidate) == ("kvquant values", part))
        for part in kvquant_candidates.PARTS
    ]
    times = [1e3 * row.median_ms / (32 if row.candidate == "packing" else 1) for row in parts]
    assert (
        f"| Value | 2048 | here, {report.device} | {' | '.join(f'{time:.1f}' for time in times)} |"
        in page
    )
    assert "| PolarQuant | paper, A800 | 50.04 | 71.69 | 163.42 | 526.65 |" in page
    for row in report.rows:
        if row.section == polarquant_candidates.SECTION:
            assert (
                f"| {row.candidate} | here, {report.device} | {1e3 * row.median_ms:.2f} |" in page
            ), row


def per_token_bytes(tree: Any, tokens: int) -> int:
    return sum(
        math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree) if tokens in a.shape
    )


@pytest.mark.parametrize("case", CASES[:1] + CASES[2:], ids=lambda case: case.section)
def test_products_count_all_that_grows_with_tokens(case: PaperCase):
    """Bytes are the stored ones and those that a call reads or writes for each token: by one rule,
    whether that is a weight or a score."""
    for planned in case.tasks(INTERPRETED, ()):
        if planned.candidate == "packing":
            continue
        task = planned.make()
        x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, timed_case.SEED)
        out = jax.eval_shape(task.calls[0][1], x, copy)
        grown = per_token_bytes((x, out), case.shape.tokens)
        assert grown == case.shape.kv_heads * case.shape.tokens * (
            4 if "key" in planned.section or planned.section == "scores" else 2
        )
        assert task.moved_bytes == task.copy_bytes + grown, (planned.section, planned.candidate)


@pytest.mark.parametrize("arithmetic", some(["asm", "jnp"], ["asm"]))
def test_kvquant_candidates_lower_for_cuda(arithmetic: str):
    launch = (Launch(arithmetic),)
    for task in kvquant_candidates.table_tasks(shape_of("Llama-2-7B", 2048, 1), launch):
        assert ("matvec" in lowered(task)) == (task.candidate in ("dense", "total")), task.candidate


@pytest.mark.parametrize("arithmetic", some(["asm", "jnp"], ["asm"]))
def test_polarquant_candidates_lower_for_cuda(arithmetic: str):
    for task in polarquant_candidates.table_tasks(
        paper_shape("Llama-3.1-8B", 4096), (Launch(arithmetic),)
    ):
        assert ("matvec_scores" in lowered(task)) == (task.candidate != innerq_candidates.EXACT), (
            task.candidate
        )


def test_kvquants_times_are_typed_as_printed():
    """The paper's total is the sum of its parts, each rounded."""
    for parts in paper_tables.TABLE_22.values():
        for packing, dense, sparse, total in zip(
            *(parts[name] for name in ("packing", "dense", "sparse", "total")), strict=True
        ):
            assert packing + dense + sparse == pytest.approx(total, abs=0.25)


@pytest.mark.parametrize(
    "planned",
    product_tasks(paper_shape("Llama-3.1-8B", 4096), (Launch("asm"),)),
    ids=lambda planned: f"{planned.section}: {planned.candidate}",
)
def test_products_lower_for_cuda(planned: Planned):
    assert ("triton" in lowered(planned)) == (planned.candidate != innerq_candidates.EXACT)


def lowered(planned: Planned) -> str:
    task = planned.make()
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, timed_case.SEED)
    [(_, call)] = task.calls
    return lower_for_cuda(timing_loop(call, task.feed, 2), x, [copy])


def test_the_plan_covers_the_papers_lengths():
    cases = PLANS.planned("all")
    for model in PAPER_MODELS:
        lengths = {c.shape.tokens for c in cases if (c.section, c.model) == ("products", model)}
        assert lengths == set(paper_tables.LENGTHS)
    assert len({case.name for case in cases}) == len(cases)
    for plan in PLANS.stages:
        tiny = {case.tiny for case in PLANS.planned(plan)}
        assert {case.section for case in tiny} == {case.section for case in PLANS.planned(plan)}
        assert all(case.shape.tokens <= 2048 for case in tiny)


def test_the_command_ends_with_the_papers_tables_and_what_it_left_out(
    report: GpuReport,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def run(cases, into: GpuReport, path, timing, **_) -> None:
        into.rows.extend(report.rows)
        into.skipped.append("attention, of no time")

    monkeypatch.setattr(kernels, "run", run)
    paper_kernels.main(["--json", str(tmp_path / "rows.json"), "--interpret"])
    printed = capsys.readouterr()
    for title in (
        "InnerQ's Table 3",
        "InnerQ's Table 4",
        "InnerQ's Figure 4",
        "KVQuant's Table 22",
        "PolarQuant's Table 4",
    ):
        assert f"## {title}" in printed.out
    [inner] = [
        r for r in report.rows if r.section == "scores" and r.candidate == innerq_candidates.INNER
    ]
    assert f"| {MODEL} | here, q K^T | inner | {inner.median_ms:.4f} |" in printed.out
    assert "1 shapes left out for lack of time\nleft out: attention, of no time" in printed.err


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
    """Their quotients are the speedups that the paper prints beside them, as far as three decimals
    of a millisecond go."""
    for model, printed in SPEEDUPS[name].items():
        other, inner = (times[2:] for times in getattr(paper_tables, name)[model])
        for i, speedup in enumerate(printed):
            assert 100 * (1 - inner[i] / other[i]) == pytest.approx(
                speedup, abs=100 * 0.001 / other[i] + 0.01
            ), (model, i)
