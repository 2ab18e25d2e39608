"""SQuat on the embedded model's activations, and the commands that measure it."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib

import numpy as np
import pytest

import kvq_jax as kvq
from benchmarks import results_page
from benchmarks.cpu import squat_prefill
from benchmarks.cpu.timing import CpuReport
from benchmarks.markdown import with_interval
from benchmarks.quality import squat_subspace
from benchmarks.quality.intervals import mean_interval, paired_ratio
from benchmarks.quality.squat_subspace import (
    before_rope,
    deviations,
    layer_inputs,
    score_error,
    tokens_of,
)
from benchmarks.quality.squat_subspace_report import Prediction, ScoreError, SubspaceReport, draw
from benchmarks.report_file import RESULTS
from kvq_models import EMBEDDED, load_llama

PROMPT, TOTAL = 256, 384


PASSAGE = "kvq_tools/cli/passage.txt"


@functools.cache
def embedded_layers(file: str = PASSAGE) -> list[kvq.LayerInputs]:
    """What the embedded model's layers see of a text."""
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    text = (squat_subspace.ROOT / file).read_text(encoding="utf-8")
    return layer_inputs(
        llama, np.asarray(tokenizer(text, verbose=False).input_ids[:TOTAL], np.int32)
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scores_of_later_queries_have_a_smaller_error_than_kivis_in_every_layer(bits: int):
    """Where the paper's Figure 2 looks, at queries and keys before RoPE, with the paper's rank and
    lambda. The subspace is that of the prompt's queries; a foreign one, of the same queries with
    their channels in another order, does not help.
    """
    for i, inputs in enumerate(map(before_rope, embedded_layers())):
        prompt, later = tokens_of(inputs, 0, PROMPT), inputs.q_rot[:, :, PROMPT:]
        kivi, squat = (
            score_error(
                later,
                prompt.k_rot,
                kvq.roundtrip(f"{name}:bits={bits}", prompt.k_rot, prompt.v, prompt.q_rot)[0],
            )
            for name in ("kivi", "squat")
        )
        assert squat < 0.95 * kivi, f"layer {i}: {squat:.4f}, and {kivi:.4f} with KIVI"
        foreign = kvq.roundtrip(
            f"squat:bits={bits}", prompt.k_rot, prompt.v, prompt.q_rot[..., ::-1]
        )[0]
        assert score_error(later, prompt.k_rot, foreign) > squat, f"layer {i}: any subspace does"


@pytest.mark.parametrize("text", [PASSAGE, "LICENSE"])
def test_after_rope_they_have_once_the_subspace_is_turned_to_their_positions(text: str):
    """Scores as the model makes them, of queries and keys after RoPE. The subspace of the prompt's
    queries where the prompt had them does not hold for the positions that follow (README of the
    method); turned there, it does, and queries that never were do not help.
    """
    options = f"rank=64,block_channels=8,ahead={TOTAL - PROMPT}"
    specs = {
        "turned": f"squat:{options}",
        "kivi": "kivi",
        "as they are": "squat:rank=64,block_channels=8",
    }
    ratios: dict[str, list[float]] = {"turned": [], "as they are": [], "foreign": []}
    for inputs in embedded_layers(text):
        prompt, later = tokens_of(inputs, 0, PROMPT), inputs.q_rot[:, :, PROMPT:]
        assert prompt.q_pre is not None
        foreign = dataclasses.replace(prompt, q_pre=prompt.q_pre[..., ::-1])
        coded = {name: kvq.roundtrip_layer(spec, prompt)[0] for name, spec in specs.items()}
        coded["foreign"] = kvq.roundtrip_layer(specs["turned"], foreign)[0]
        errors = {name: score_error(later, prompt.k_rot, keys) for name, keys in coded.items()}
        for name in ratios:
            ratios[name].append(errors[name] / errors["kivi"])
    means = {name: float(np.exp(np.mean(np.log(found)))) for name, found in ratios.items()}
    assert means["turned"] < 0.95, f"errors relative to KIVI's, by layer: {ratios}"
    assert max(ratios["turned"][1:]) < 0.95, (
        f"by layer: {ratios}"
    )  # the first layer, wired by hand, gains nothing
    assert ratios["turned"][0] < 1.03, f"by layer: {ratios}"
    assert means["as they are"] > 0.98, f"turning them is not what helps: {means}"
    assert means["foreign"] > 0.98, f"any subspace does: {means}"


def test_deviation_falls_with_the_rank_to_zero_and_is_zero_inside():
    inputs = before_rope(embedded_layers()[1])
    prompt, later = tokens_of(inputs, 0, PROMPT), inputs.q_rot[:, :, PROMPT:]
    found = deviations(prompt.q_rot, later, 2)
    assert (np.diff(found) <= 1e-6).all()
    assert found[-1] < 1e-2 < 0.3 < found[0] < 1
    narrow = prompt.q_rot.at[..., 8:].set(0)  # 8 dimensions
    assert deviations(narrow, narrow, 2)[7] < 1e-2 < deviations(narrow, narrow, 2)[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("results")
    small = [
        "--quick",
        "--head-dim",
        "32",
        "--kv-heads",
        "2",
        "--group",
        "2",
        "--cache",
        "kivi",
        "squat",
        "squat_pre",
    ]
    squat_prefill.main([*small, "--json", str(folder / "squat_prefill_cpu.json")])
    return folder


def test_the_prefill_benchmark_has_a_row_for_each_cache(results: pathlib.Path):
    report = CpuReport.read(results / "squat_prefill_cpu.json")
    assert [row.implementation for row in report.rows] == ["kivi", "squat", "squat_pre"]
    assert all(row.error < 1e-4 for row in report.rows)
    assert report.rows[1].cache_bytes > report.rows[0].cache_bytes, "the matrices take memory"


def test_committed_numbers_are_read_as_they_were_written_drawn_and_tabulated(
    tmp_path: pathlib.Path,
):
    report = SubspaceReport.read(RESULTS / "squat_subspace_smollm2.json")
    report.write(tmp_path / "squat_subspace.json")
    assert SubspaceReport.read(tmp_path / "squat_subspace.json") == report
    draw(report).savefig(tmp_path / "plot.png")
    page = results_page.render(tmp_path)["squat_subspace.md"]
    ratio, deviation, layer = (
        report.ratio("squat", 5, 1e-3),
        report.deviation("prompt", False)[0],
        report.layer_ratios("squat", 5, 1e-3)[7],
    )
    for found, format in ((ratio, ".3f"), (deviation, ".2f"), (layer, ".2f")):
        assert found.interval.low < found.value < found.interval.high
        assert f"| {with_interval(*found, format)} |" in page
    assert "nats of" not in page, "no caches were read"
    read = dataclasses.replace(report, predictions=(Prediction("kivi", 100, (1.0, 1.5)),))
    read.write(tmp_path / "squat_subspace.json")
    low, high = mean_interval((1.0, 1.5))
    assert (
        f"| `kivi` | 1.250 [{low:.3f}, {high:.3f}] |"
        in results_page.render(tmp_path)["squat_subspace.md"]
    )


def test_a_page_has_the_ratios_of_every_layer_and_none_of_caches_that_were_not_read(
    tmp_path: pathlib.Path,
):
    """Two layers in two windows. What makes the second window hard for both methods leaves no trace
    in the first layer's ratio."""
    errors = {
        (None, None): ((1.0, 3.0), (2.0, 2.0)),
        (5, 1e-3): ((0.5, 1.5), (2.0, 4.0)),
        (7, 1e-3): ((0.25, 0.75), (1.0, 1.0)),
    }
    report = dataclasses.replace(
        SubspaceReport.read(RESULTS / "squat_subspace_smollm2.json"),
        windows=2,
        score_ranks=(5, 7),
        lams=(1e-3,),
        errors=tuple(
            ScoreError("squat", rank, lam, layer, e)
            for (rank, lam), both in errors.items()
            for layer, e in enumerate(both)
        ),
        predictions=(),
    )
    first, second = report.layer_ratios("squat", 5, 1e-3).values()
    assert first.value == pytest.approx(0.5)
    assert math.isnan(first.interval.low), "the ratio is the same in both windows"
    assert second == paired_ratio((2.0, 4.0), (2.0, 2.0))
    assert report.ratio("squat", 7, 1e-3).value == pytest.approx((0.25 * 0.5) ** 0.5)
    of_windows = (0.5 * 1.0) ** 0.5, (0.5 * 2.0) ** 0.5  # geometric means over the layers
    ratio, wanted = report.ratio("squat", 5, 1e-3), paired_ratio(of_windows, (1.0, 1.0))
    assert ratio.interval == pytest.approx(wanted.interval)
    report.write(tmp_path / "squat_subspace_other.json")
    page = results_page.render(tmp_path)["squat_subspace_other.md"]
    assert (
        "| rank 5, lam 0.001: layer | squat |\n| --- | --- |\n| 0 | 0.50 |\n| 1 |"
        f" {with_interval(*second, '.2f')} |" in page
    )
    assert "| rank 7, lam 0.001: layer | squat |\n| --- | --- |\n| 0 | 0.25 |\n| 1 | 0.50 |" in page
    assert "nats of" not in page


def test_every_window_has_a_response_of_its_own_and_keeps_its_numbers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """The first of two windows has the numbers that it has alone; the second one has others."""
    monkeypatch.setattr(squat_subspace, "CACHES", ("dense", "kivi"))
    sizes = [
        "--text",
        str(squat_subspace.ROOT / PASSAGE),
        "--prompt",
        "32",
        "--response",
        "32",
        "--rank",
        "5",
        "--lam",
        "0.001",
    ]
    for windows in (1, 2):
        squat_subspace.main(
            [
                *sizes,
                "--windows",
                str(windows),
                "--predicted",
                "2",
                "--json",
                str(tmp_path / f"{windows}.json"),
            ]
        )
        assert (tmp_path / f"{windows}.png").exists()
    one, two = (SubspaceReport.read(tmp_path / f"{windows}.json") for windows in (1, 2))
    for alone, both in zip(
        (*one.errors, *one.deviations), (*two.errors, *two.deviations), strict=True
    ):
        assert dataclasses.replace(both, windows=both.windows[:1]) == alone
        assert len(both.windows) == 2
    assert all(row.windows[0] != row.windows[1] for row in two.errors)
    assert [(row.cache, row.tokens, len(row.window_nats)) for row in two.predictions] == [
        ("dense", 62, 2),
        ("kivi", 62, 2),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "5", "65"], "rank 65 must be at most the model's head_dim (64)"),
        (["--lam", "0.1"], "--lam must name 0.001"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(
    words: list[str], said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        squat_subspace.main(["--json", str(tmp_path / "out.json"), *words])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_short_text_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "short.txt").write_text("It was a dark and stormy night.", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        squat_subspace.main(
            ["--json", str(tmp_path / "out.json"), "--text", str(tmp_path / "short.txt")]
        )
    assert stop.value.code == 2
    assert "short.txt must have 1536 tokens" in capsys.readouterr().err
