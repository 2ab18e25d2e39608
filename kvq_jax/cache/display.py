"""Show an object as a line of text, or as a small table in a notebook, from the same facts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

MAX_ROWS = 8  # lengths that are listed; of more, the smallest and the largest are shown


def line(name: str, facts: Mapping[str, object]) -> str:
    """Return `name(fact, label fact, ...)`. A fact with an empty label stands alone."""
    return f"{name}({', '.join(f'{label} {fact}'.strip() for label, fact in facts.items())})"


def table(name: str, facts: Mapping[str, object]) -> str:
    """Return the facts as an HTML table with a caption."""
    rows = "".join(
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(str(fact))}</td></tr>"
        for label, fact in facts.items()
    )
    return f"<table><caption>{html.escape(name)}</caption>{rows}</table>"


def values(array: Any) -> str:
    """Return the entries of a vector as text, or "traced", "donated" or "not allocated" if it has
    none now."""
    if isinstance(array, Tracer):
        return "traced"
    if isinstance(array, jax.Array) and array.is_deleted():
        return "donated"
    if not isinstance(array, jax.Array | np.ndarray):
        return "not allocated"
    entries = np.asarray(array).ravel()
    if entries.size > MAX_ROWS:
        return f"{entries.min()} to {entries.max()}"
    return str(entries.tolist())


def size(tree: Any) -> str:
    """Return the bytes of a tree's arrays, or of the arrays that it describes, as text."""
    whole = sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype")
    )
    value, unit = float(whole), 0
    while value >= 1024 and unit < 4:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{whole} B"
