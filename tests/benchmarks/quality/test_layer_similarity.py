"""The similarity of successive layers: its two measures on rows made for it, and the command."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import kvq_tools.cli
from benchmarks import results_page
from benchmarks.quality import layer_similarity
from benchmarks.quality.layer_similarity import KINDS, SimilarityReport, cosine, relative_range

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
    assert relative_range(change, before, 16) == pytest.approx(2**0.5, abs=0.1), "what has nothing in common is harder to code"
    with pytest.raises(ValueError, match="groups of 48 channels do not divide rows of 64"):
        relative_range(change, before, 48)


def test_a_range_is_that_of_a_group_of_channels():
    before, after = np.zeros((1, 8), np.float32), np.asarray([[0, 1, 0, 1, 0, 100, 0, 100]], np.float32)
    before[0, 7] = 50
    assert relative_range(after, before, 4) == pytest.approx((1 + 1) / 2)
    assert relative_range(after, 0.5 * after, 4) == pytest.approx(0.5)


def test_the_command_measures_every_pair_of_layers(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "layer_similarity.json"
    layer_similarity.main([f"--json={file}", f"--text={PASSAGE}", "--tokens=64"])
    report = SimilarityReport.read(file)
    assert [pair.layer for pair in report.pairs] == [1, 2, 3]
    stream, keys = (KINDS.index(kind) for kind in ("residual stream", "keys"))
    assert all(pair.cosines[stream] > pair.cosines[keys] for pair in report.pairs[1:]), "a residual stream changes less than keys"
    page = results_page.render(tmp_path)["layer_similarity.md"]
    assert f"| 3 | {' | '.join(f'{value:.2f}' for value in report.pairs[-1].cosines)} |" in page
    assert file.with_suffix(".png").exists()
    with pytest.raises(SystemExit):
        layer_similarity.main([f"--json={file}", f"--text={PASSAGE}", "--tokens=1000000"])
    assert "passage.txt must have 1000000 tokens" in capsys.readouterr().err
