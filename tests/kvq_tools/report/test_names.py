"""Names in a report: cut, with their bits, without formulas or directories, and never upon one
another.

They are looked at in the committed report: no model runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import pytest

from kvq_tools.report import drawing, page, quality, schema
from kvq_tools.report.drawing import LIGHT, label

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox


@pytest.fixture(scope="module")
def report():
    return schema.read(pathlib.Path(__file__).with_name("smollm2_report.json"))


def test_a_dollar_in_the_name_of_a_cache_begins_no_formula(report):
    """Matplotlib raises ValueError for a formula that it cannot read, when it draws."""
    named = tuple(
        dataclasses.replace(cache, name=f"$\\frac{{$ {cache.name}") for cache in report.caches
    )
    for section in page.sections(dataclasses.replace(report, caches=named)):
        for picture in section.pictures:
            assert picture.light, picture.name


def test_a_long_name_is_cut_and_keeps_its_number():
    assert label(3, "kivi:bits=2") == "3 kivi:bits=2"
    long = label(12, "k=polarquant:radius_bits=2+v=innerq:bits=2+cache:recent=96")
    assert long.startswith("12 k=polarquant:radius")
    assert long.endswith("…")
    assert label(1, "kivi", 3.05) == "1 kivi, 3.0 bits", (
        "a name that leaves its bits to the default shows them"
    )
    assert label(12, long, 3.1).endswith("…, 3.1 bits"), "a cut name keeps them"


def names_without_room(drawn):
    """Return the names in a picture's legend that leave the picture or lie on another."""
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    width, height = canvas.get_width_height()
    boxes = {text.get_text(): text.get_window_extent() for text in drawn.legends[0].get_texts()}
    assert len(boxes) == 9
    found = [
        name
        for name, box in boxes.items()
        if min(box.x0, box.y0) < 0 or box.x1 > width or box.y1 > height
    ]
    return found + [
        a for a, b in itertools.combinations(boxes, 2) if Bbox.intersection(boxes[a], boxes[b])
    ]


def test_a_bad_cache_among_good_ones_pushes_no_names_onto_one_another(report, monkeypatch):
    long = "k=polarquant:radius_bits=2+v=innerq:bits=2+cache:recent=96,block=64,sink=32"
    bad = [dataclasses.replace(report.caches[0], name=long, perplexity=173.0, kl=5.0)] * 3
    good = [
        dataclasses.replace(report.caches[1], perplexity=8.0 + i / 100, kl=0.01 + i / 1e4)
        for i in range(6)
    ]
    changed = dataclasses.replace(report, caches=(*good, *bad))
    for draw in (quality.pareto_kl, quality.pareto_perplexity):
        drawn = draw(changed).draw(LIGHT)
        assert not names_without_room(drawn), draw.__name__
        assert not [text for text in drawn.axes[0].texts if text.get_text()], (
            "names stand in the legend, never at points"
        )
    monkeypatch.setattr(drawing, "LEGEND_LENGTH", 80)
    assert names_without_room(quality.pareto_kl(changed).draw(LIGHT)), (
        "the check sees names that are too long"
    )


def test_headings_name_no_directories(report):
    folder = "/home/someone/models/Llama-3.1-8B"
    changed = dataclasses.replace(
        report,
        model=dataclasses.replace(report.model, name=folder),
        text=dataclasses.replace(report.text, name="/tmp/wiki.txt"),
    )
    head = page.html(changed, ()).partition("<pre>")[0]
    assert "<title>kvq report: Llama-3.1-8B</title>" in head
    assert f"<h1>Llama-3.1-8B through {len(report.caches)} KV caches</h1>" in head
    assert f"wiki.txt: {report.text.tokens} tokens" in head
    assert folder not in head
    assert "/tmp/" not in head
    assert [page.title(name) for name in ("embedded", "meta-llama/Llama-3.1-8B")] == [
        "embedded",
        "meta-llama/Llama-3.1-8B",
    ]
