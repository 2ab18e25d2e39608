"""The table of docs/scale.md is that of `python -m benchmarks.placements`."""

from __future__ import annotations

import pytest

from benchmarks.placements import CACHES, HEAD, MODELS, PAGE, SIZES, row
from tests.exhaustive import some


@pytest.mark.parametrize("size", some([(size,) for size in SIZES], [(SIZES[-1],)]), ids=str)
@pytest.mark.parametrize("model", some(tuple(MODELS), ("8B",)))
def test_the_page_has_the_rows_that_are_counted(model: str, size: tuple[int, str, int]):
    lines = PAGE.read_text().splitlines()
    shown = [
        line for line in lines if line.startswith(f"| {model} | {size[0]}{size[1]} x {size[2]} |")
    ]
    assert shown == ["| " + " | ".join(row(model, size, cache)) + " |" for cache in CACHES]
    assert "| " + " | ".join(HEAD) + " |" in lines
