"""Drawn pictures fit with any font: each text has a length of its own, and ends inside the
picture."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def texts_outside(source: str) -> list[str]:
    """Return the texts without a length, and those that leave the picture."""
    root = ElementTree.fromstring(source)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    parents = {child: parent for parent in root.iter() for child in parent}
    found = []
    for text in root.iter(f"{SVG}text"):
        middle = "middle" in (text.get("text-anchor"), parents[text].get("text-anchor"))
        length = float(text.get("textLength", "inf"))
        left = float(text.attrib["x"]) - (length / 2 if middle else 0)
        if not (left >= 0 and left + length <= width and 0 < float(text.attrib["y"]) < height):
            found.append("".join(text.itertext()))
    return found


@pytest.mark.parametrize("name", ["cache_regions.svg"])
def test_texts_fit_with_any_font(name):
    source = (DOCS / name).read_text(encoding="utf-8")
    assert not texts_outside(source)
    assert len(texts_outside(source.replace("textLength", "x-length"))) == source.count("<text"), (
        "the check sees texts without a length"
    )
    assert texts_outside(source.replace('x="20"', 'x="520"')), (
        "the check sees texts that leave the picture"
    )
