"""Find tokens that a cache cannot hold: full-precision rows beyond its dtype, which are stored as
inf (float16 ends at 65504), and quantized ones at an end of the range of their scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.arrays.stored import load_body
from kvq_jax.cache.cache import Cache, check_cache
from kvq_jax.cache.moving import move
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.types.array_types import Tree

End = Literal["infinite", "large", "small"]


class Overflow(NamedTuple):
    """Tokens that one side of a layer does not hold as they were.

    Attributes:
        row: the batch row.
        layer: the layer.
        side: "k", "v", or the one side of a joint body.
        end: "infinite" if a row in full precision exceeded the cache's dtype. "large" if quantized
            entries saturated: at about 32720 under float16 scales, at 6e4 under logarithmic ones
            and as outliers of a channel, or at the largest number under the scale that the first
            tokens gave. "small" if tokens lie so far below 6e-5 that float16 scales tell little of
            them, or below the least logarithmic scale, 1.5e-5.
    """

    row: int
    layer: int
    side: str
    end: End = "infinite"


def overflowed(cache: Cache) -> tuple[Overflow, ...]:
    """Return the sides of layers whose live tokens exceed what the cache can hold, at either end.
    Copies the windows to the host.

    An infinite row that has left its window was quantized with its group's finite extreme in place
    of inf, and is no longer found. Nor are radii beyond polarquant's global grid, or entries beyond
    2^20 of rotated rows if their scales are not float16, which would end before.

    Args:
        cache: the cache, on any placement.

    Raises:
        ValueError: if the cache was consumed.
    """
    check_cache(cache)
    if cache.placement is not None:
        cache = move(cache, None)  # body arrays in the order of tokens
    overflows, lengths = [], np.asarray(cache.lengths)
    for number, (plan, layer) in enumerate(zip(cache.plans, cache.layers, strict=True)):
        sink = np.arange(plan.regions.sink_slots)[None] < lengths[:, None]
        ring = np.asarray(plan.regions.ring_positions(jnp.asarray(lengths))) >= plan.regions.sink
        sides = zip(plan.names, plan.codecs, layer.sink, layer.ring, layer.body, strict=True)
        for side, codec, *windows, stored in sides:
            ends: dict[End, np.ndarray] = {"infinite": np.zeros(len(lengths), bool)}
            for window, live in zip(windows, (sink, ring), strict=True):
                infinite = np.isinf(np.asarray(window)).any(axis=(1, 3)) & live
                ends["infinite"] |= infinite.any(axis=1)
            body = load_body(codec.body(1, plan.heads, plan.regions.block), stored)
            for end, rows in _of_body(plan, body, lengths):
                ends[end] = ends.get(end, False) | rows
            overflows += [
                Overflow(int(row), number, side, end)
                for end, rows in ends.items()
                for row in np.flatnonzero(rows)
            ]
    return tuple(overflows)


def _of_body(plan: LayerPlan, body: Tree, lengths: np.ndarray) -> Iterator[tuple[End, np.ndarray]]:
    """Return the rows whose live body meets an end, for each of its arrays that knows its range."""
    if not plan.regions.body_capacity:
        return
    regions = plan.regions
    aged = np.array([min(regions.aged_tokens(int(n)), regions.read_capacity) for n in lengths])
    for array in jax.tree.leaves(body, is_leaf=lambda node: hasattr(node, "out_of_range")):
        counted = array.out_of_range() if hasattr(array, "out_of_range") else None
        for end, runs in () if counted is None else zip(("large", "small"), counted, strict=True):
            first = np.arange(runs.shape[1]) * regions.held_capacity // runs.shape[1]
            yield end, (np.asarray(runs) & (first[None] < aged[:, None])).any(axis=1)
