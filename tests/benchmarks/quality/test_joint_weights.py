"""Weights and caches together: a line for each kind of weights, run on where it stopped; and the
picture of methods over bits."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import results_page
from benchmarks.quality import front_figure, joint_weights
from benchmarks.quality.comparison import PLAIN
from benchmarks.quality.joint_weights import JointReport
from benchmarks.quality.report import QualityReport, QualityRow, Text

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


def test_the_picture_has_a_line_for_each_method_and_its_intervals():
    def row(cache: str, bits: float, kl: float) -> QualityRow:
        sizes = {
            "paper_bits": None,
            "outlier_fraction": 0.0,
            "cache_bytes": 1,
            "tokens": 1,
            "nats": 1.0,
            "agreement": 1.0,
        }
        windows = {"window_kl": (kl / 2, 1.5 * kl)}
        place = {
            "table": "t",
            "cells": (cache,),
            "column": "",
            "cache": cache,
            "other_text": False,
            "variant": PLAIN,
        }
        return QualityRow(stored_bits=bits, kl=kl, **sizes, **windows, **place)

    text = Text("text.txt", "", 1)
    rows = (
        row("waterfill:bits=2", 2, 0.1),
        row("waterfill:bits=3", 3, 0.02),
        row("kivi:bits=2", 3, 0.2),
        row("kivi:bits=2", 3, 0.2),
    )
    sizes = {"window": 8, "prompt": 4, "samples": 1, "sample_length": 8}
    about = {"command": "", "date": "", "jax_version": "", "model": "m", "heads": {}, "text": text}
    report = QualityReport(
        **about, **sizes, calibration_text=text, other_calibration_text=None, rows=rows
    )
    (axes,) = front_figure.draw(report).axes
    drawn = {line.get_label(): line for line in axes.containers}
    assert list(drawn) == ["waterfill", "kivi"]
    assert drawn["waterfill"].lines[0].get_xydata().tolist() == [[2.0, 0.1], [3.0, 0.02]]
    assert len(drawn["kivi"].lines[0].get_xdata()) == 1, "a cache of two tables is drawn once"
