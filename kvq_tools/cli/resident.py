"""Resident bytes in the tables of commands that compare caches: of one sequence and of 16, because
what a method adds to the model weighs less in a large batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvq_jax as kvq
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_tools.cli.console import format_bytes


def by_batch(
    spec: kvq.cache.CacheSpec | str,
    config: kvq.types.ModelDims,
    capacity: int,
    dtype: str,
    batch: int = 1,
) -> list[dict[str, int]]:
    """Return the resident bytes of a cache for the batches that are always compared, and for
    `batch`."""
    return [
        {"batch": rows, "bytes": kvq.size.of(spec, config, rows, capacity, dtype).resident}
        for rows in sorted({*COMPARED_BATCHES, batch})
    ]


def columns(caches: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the heads of the columns that `cells` fills."""
    return tuple(f"resident, batch {entry['batch']}" for entry in caches[0]["resident_by_batch"])


def cells(cache: dict[str, Any]) -> tuple[str, ...]:
    return tuple(format_bytes(entry["bytes"]) for entry in cache["resident_by_batch"])


def largest_context(
    spec: kvq.cache.CacheSpec, config: kvq.types.ModelDims, batch: int, dtype: str, budget: int
) -> int:
    """Return the largest capacity whose resident bytes are at most `budget`, or 0. A cache never
    shrinks when its capacity grows."""

    def fits(capacity: int) -> bool:
        return kvq.size.of(spec, config, batch, capacity, dtype).resident <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
