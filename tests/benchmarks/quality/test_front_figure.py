"""The picture of methods over stored bits."""

from __future__ import annotations

from benchmarks.quality import front_figure
from benchmarks.quality.comparison import PLAIN
from benchmarks.quality.report import QualityReport, QualityRow, Text


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
