"""Shapes as commands name them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def points_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return (tokens, batch) of each TOKENS:BATCH. Raises ValueError for another form."""
    points = []
    for text in texts:
        if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", text):
            raise ValueError(f"{text!r} is not a shape: write TOKENS:BATCH")
        tokens, batch = map(int, text.split(":"))
        points.append((tokens, batch))
    return points
