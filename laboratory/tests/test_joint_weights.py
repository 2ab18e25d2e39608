"""Weights and caches together: a line for each kind of weights."""

from __future__ import annotations

import pathlib

import pytest

from laboratory import results_page
from laboratory.quality import joint_weights
from laboratory.quality.joint_weights import JointReport

TEXT = "kvq_tools/cli/passage.txt"
SIZES = ("--windows", "2", "--window", "96", "--prompt", "64", "--samples", "1", "--length", "64")


def test_weights_and_caches_are_measured_together(
    shallow, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(joint_weights, "WEIGHT_SAMPLES", 1)
    monkeypatch.setattr(joint_weights, "WEIGHT_LENGTH", 64)
    file = tmp_path / "joint_weights.json"
    words = [
        f"--model={shallow}",
        f"--text={TEXT}",
        f"--calibration-text={TEXT}",
        *SIZES,
        f"--json={file}",
    ]
    caches = ["--cache", "dense", "int2:sink=0,recent=0,block=16"]
    joint_weights.main([*words, "--weights", "16", "3", *caches])
    rows = {(row.weights, row.cache): row for row in JointReport.read(file).rows}
    assert len(rows) == 4
    exact, cache, weights, both = (
        rows[bits, name].perplexity for bits in ("16", "3") for name in caches[1:]
    )
    assert exact < weights
    assert exact < cache < both * 1.05
    assert rows["3", "dense"].weight_bits > 3
    assert rows["3", "dense"].weights_kl > 0.01
    assert rows["16", "dense"].weights_kl is None
    page = results_page.render(tmp_path)["joint_weights.md"]
    assert f"{both:.3f}" in page
