"""Find full-precision rows that a cache's dtype cannot hold: float16 ends at 65504, and larger
values are silently stored as inf."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.cache import Cache


class Overflow(NamedTuple):
    """A window that holds an infinite value.

    Attributes:
        row: the batch row.
        layer: the layer.
        side: "k", "v", or the one side of a joint body.
    """

    row: int
    layer: int
    side: str


def overflowed(cache: Cache) -> tuple[Overflow, ...]:
    """Return the windows of live tokens in which a value exceeded the cache's dtype. Copies the
    windows to the host.

    Tokens that have left a window were quantized with their group's finite extreme in place of inf,
    and are no longer found.

    Args:
        cache: the cache.
    """
    overflows, lengths = [], np.asarray(cache.lengths)
    for number, (plan, layer) in enumerate(zip(cache.plans, cache.layers, strict=True)):
        sink = np.arange(plan.regions.sink_slots)[None] < lengths[:, None]
        ring = np.asarray(plan.regions.ring_positions(jnp.asarray(lengths))) >= plan.regions.sink
        for side, *windows in zip(plan.names, layer.sink, layer.ring, strict=True):
            infinite = np.zeros(len(lengths), bool)
            for window, live in zip(windows, (sink, ring), strict=True):
                infinite |= (np.isinf(np.asarray(window)).any(axis=(1, 3)) & live).any(axis=1)
            overflows += [Overflow(int(row), number, side) for row in np.flatnonzero(infinite)]
    return tuple(overflows)
