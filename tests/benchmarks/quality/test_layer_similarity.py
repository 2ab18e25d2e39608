"""The similarity of successive layers: its two measures on rows made for it, and the command."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

import kvq_tools.cli
from benchmarks import results_page
from benchmarks.markdown import with_interval
from benchmarks.quality import layer_similarity
from benchmarks.quality.intervals import mean_interval
from benchmarks.quality.layer_similarity import (
    KINDS,
    Pair,
    SimilarityReport,
    cosine,
    measured,
    relative_range,
)
from benchmarks.quality.squat_subspace import layer_inputs
from benchmarks.quality.study import first_tokens
from benchmarks.report_file import header
from kvq_models import EMBEDDED, load_llama

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"


def test_rows_that_change_little_have_a_cosine_near_one_and_a_small_range():
    rng = np.random.default_rng(0)
    before, change = (rng.normal(size=(200, 64)).astype(np.float32) for _ in range(2))
    assert cosine(before, before) == pytest.approx(1, abs=1e-6)
    assert cosine(-before, before) == pytest.approx(-1, abs=1e-6)
    assert cosine(3 * before, before) == pytest.approx(1, abs=1e-6), "lengths count"
    assert abs(cosine(change, before)) < 0.05
    assert cosine(before + change, before) == pytest.approx(0.5**0.5, abs=0.02)
    assert relative_range(before + 0.1 * change, before, 16) == pytest.approx(0.1, abs=0.01)
    assert relative_range(change, before, 16) == pytest.approx(2**0.5, abs=0.1), (
        "what has nothing in common is harder to code"
    )
    with pytest.raises(ValueError, match="groups of 48 channels do not divide rows of 64"):
        relative_range(change, before, 48)


def test_a_range_is_that_of_a_group_of_channels():
    before, after = (
        np.zeros((1, 8), np.float32),
        np.asarray([[0, 1, 0, 1, 0, 100, 0, 100]], np.float32),
    )
    before[0, 7] = 50
    assert relative_range(after, before, 4) == pytest.approx((1 + 1) / 2)
    assert relative_range(after, 0.5 * after, 4) == pytest.approx(0.5)


def test_the_command_measures_every_pair_of_layers_in_every_window(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "layer_similarity.json"
    layer_similarity.main([f"--json={file}", f"--text={PASSAGE}", "--windows=3", "--tokens=64"])
    report = SimilarityReport.read(file)
    assert [pair.layer for pair in report.pairs] == [1, 2, 3]
    assert all(
        np.shape(field) == (3, len(KINDS))
        for pair in report.pairs
        for field in (pair.cosines, pair.ranges)
    )
    stream, keys = (KINDS.index(kind) for kind in ("residual stream", "keys"))
    assert all(
        (np.asarray(pair.cosines)[:, stream] > np.asarray(pair.cosines)[:, keys]).all()
        for pair in report.pairs[1:]
    ), "a residual stream changes less than keys"
    assert file.with_suffix(".png").exists()
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    alone = measured(layer_inputs(llama, first_tokens(tokenizer, PASSAGE, 192)[64:128]), 64)
    wanted = [[pair.cosines[1] for pair in report.pairs], [pair.ranges[1] for pair in report.pairs]]
    np.testing.assert_allclose(
        alone, wanted, atol=2e-5, err_msg="the second window is not a sequence of its own"
    )
    assert (
        np.abs(
            np.subtract(
                alone,
                [
                    [pair.cosines[0] for pair in report.pairs],
                    [pair.ranges[0] for pair in report.pairs],
                ],
            )
        ).max()
        > 1e-3
    )
    with pytest.raises(SystemExit):
        layer_similarity.main([f"--json={file}", f"--text={PASSAGE}", "--tokens=1000000"])
    assert "passage.txt must have 8000000 tokens" in capsys.readouterr().err


def test_a_mean_of_layers_has_the_interval_of_their_windows(tmp_path: pathlib.Path):
    """Two windows; layers that move against each other from window to window leave their mean where
    it is, and no spread to make an interval of."""
    cosines = {1: (0.1, 0.1), 2: (0.2, 0.2), 3: (0.6, 0.8), 4: (0.8, 0.6), 5: (0.7, 0.7)}
    pairs = tuple(
        Pair(layer, *(2 * (tuple((value,) for value in windows),)))
        for layer, windows in cosines.items()
    )
    report = SimilarityReport(
        title="Similarity",
        **header(["x"]),
        model="m",
        text="t",
        windows=2,
        tokens=64,
        group=64,
        kinds=("keys",),
        pairs=pairs,
    )
    report.write(tmp_path / "layer_similarity.json")
    page = results_page.render(tmp_path)["layer_similarity.md"]
    low, high = mean_interval((0.6, 0.8))
    for line in (
        "| mean | 0.480 |",
        "| mean from 3 on | 0.700 |",
        f"| 3 | 0.700 [{low:.3f}, {high:.3f}] |",
    ):
        assert line in page, f"{line!r} is missing from\n{page}"
    alone = dataclasses.replace(
        report, windows=1, pairs=tuple(dataclasses.replace(p, cosines=p.cosines[:1]) for p in pairs)
    )
    assert with_interval(*alone.means("cosines", 3)[0], ".2f") == "0.70", (
        "one window has no interval"
    )
