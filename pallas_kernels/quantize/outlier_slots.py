"""Collect the outliers of a block into the slots of their pool as the block leaves its ring
(table.py).

    index[p, e] = (t within the pool) * H + h,   residual[p, e] = x - x^,
    ends[p, k]  = the first slot behind the slots of head k

Slots are sorted by head, then token, then channel. Slots behind the last end are zero. If a pool
has more outliers than slots, the largest residuals are kept, and of equal ones the first. These are
the equations of `kvq_jax.arrays.sparse_outliers`.

A program writes the slots of one head, and has to count the outliers of all heads. So each of the K
programs of a pool counts them again. If there are too many, bisection on the bits of the residuals
finds which ones to keep, in up to 31 rounds that compute all residuals.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import plt

MAX_DROPPED = (1 << 16) - 1  # the most that 16 bits count
_INFINITY_BITS = 0x7F800000  # the bits of fp32 infinity, which are above the bits of any residual
_AT_ONCE = 128  # unused slots that a step clears

Tile = Float[Array, "32 H"]
# The arguments are a head, and the first token of a span of the pool.
Residuals = Callable[[Any, int], tuple[Bool[Array, "32 H"], Tile]]


@dataclasses.dataclass(frozen=True)
class Slots:
    """The slots of a pool: `tokens` share `count` slots. If `overflows`, there may be more outliers
    than that, and the dropped ones are counted in an array.
    """

    tokens: int
    count: int
    overflows: bool


def collect(
    slots: Slots,
    residuals: Residuals,
    head: Any,
    heads: int,
    channels: int,
    pool: Any,
    refs: Sequence[Any],
) -> None:
    """Write the slots of one head of a pool.

    Args:
        slots: of a pool.
        residuals: returns the mask of outliers and x - x^, fp32, of SPAN tokens of a head.
        head: whose slots are written.
        heads: K.
        channels: H.
        pool: its number.
        refs: index [n, P], residual [n, P], ends [n, K] and, if slots overflow, dropped [n].
    """
    index_ref, residual_ref, ends_ref, *dropped_ref = refs
    spans = range(0, slots.tokens, SPAN)

    def counted(minimum: Any) -> tuple[Array, Array]:
        """Return how many outliers have residuals with larger bits, in the heads before this one
        and in all heads.
        """
        return _over_heads(
            head, heads, lambda h: _count(residuals, h, spans, lambda bits: bits > minimum)
        )

    before, total = counted(-1)
    minimum, equal_before, kept_equal = jnp.int32(-1), jnp.int32(0), jnp.int32(0)
    if slots.overflows:
        minimum = smallest_kept(slots.count, total, lambda bits: counted(bits)[1])
        before, larger = counted(minimum)
        equal_before, _ = _over_heads(
            head, heads, lambda h: _count(residuals, h, spans, lambda bits: bits == minimum)
        )
        kept_equal = slots.count - larger
        before = before + jnp.minimum(equal_before, kept_equal)
        pl.when(head == 0)(
            functools.partial(_store_dropped, dropped_ref, pool, total - slots.count)
        )
    place, equals = before, equal_before
    for span in spans:
        mask, residual = residuals(head, span)
        bits = magnitude_bits(residual)
        kept = mask & (bits > minimum)
        if slots.overflows:
            equal = mask & (bits == minimum)
            kept |= equal & (equals + _rank(equal) < kept_equal)
            equals = equals + _sum(equal)
        # beyond the slots for entries that have none
        at = jnp.where(kept, place + _rank(kept), slots.count)
        token, channel = (lax.broadcasted_iota(jnp.int32, mask.shape, axis) for axis in (0, 1))
        largest = float(jnp.finfo(residual_ref.dtype).max)
        plt.store(
            index_ref.at[pool, at],
            ((span + token) * channels + channel).astype(index_ref.dtype),
            mask=kept,
        )
        plt.store(
            residual_ref.at[pool, at],
            jnp.clip(residual, -largest, largest).astype(residual_ref.dtype),
            mask=kept,
        )
        place = place + _sum(kept)
    ends_ref[pool, head] = place.astype(ends_ref.dtype)
    pl.when(head == heads - 1)(
        functools.partial(_clear, slots.count, place, pool, (index_ref, residual_ref))
    )


def _over_heads(head: Any, heads: int, count: Callable[[Any], Array]) -> tuple[Array, Array]:
    """Return the sum of the counts over the heads before this one, and over all heads."""

    def add(other: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        of_head = count(other)
        return sums[0] + jnp.where(other < head, of_head, 0), sums[1] + of_head

    return lax.fori_loop(0, heads, add, (jnp.int32(0), jnp.int32(0)))


def _count(
    residuals: Residuals, head: Any, spans: Sequence[int], counts: Callable[[Array], Array]
) -> Int[Array, ""]:
    total = jnp.int32(0)
    for span in spans:
        mask, residual = residuals(head, span)
        total = total + _sum(mask & counts(magnitude_bits(residual)))
    return total


def smallest_kept(slots: int, total: Array, larger: Callable[[Array], Array]) -> Int[Array, ""]:
    """Return the bits above which every residual has a slot: the least b with larger(b) <= slots,
    or one with as many, or -1 if all have a slot.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + lax.div(high - low, 2)
        count = larger(middle)
        fits = count <= slots
        low = jnp.where(fits, jnp.where(count == slots, middle, low), middle + 1)
        return low, jnp.where(fits, middle, high)

    too_many = (total > slots).astype(jnp.int32)
    bounds = too_many - 1, too_many * (_INFINITY_BITS + 1) - 1
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[1]


def magnitude_bits(residual: Tile) -> Int[Array, "32 H"]:
    """Return the bits of the magnitudes, which have the same order as the magnitudes."""
    return lax.bitcast_convert_type(jnp.abs(residual), jnp.int32)


def _rank(mask: Bool[Array, "32 H"]) -> Int[Array, "32 H"]:
    """Return how many entries of the mask come before each entry, by token and then by channel."""
    ones = mask.astype(jnp.int32)
    of_tokens = jnp.sum(ones, axis=1)
    return jnp.cumsum(ones, axis=1) - ones + (jnp.cumsum(of_tokens) - of_tokens)[:, None]


def _sum(mask: Bool[Array, "32 H"]) -> Int[Array, ""]:
    return jnp.sum(jnp.sum(mask.astype(jnp.int32), axis=1), axis=0)


def _store_dropped(refs: Sequence[Any], pool: Any, count: Array) -> None:
    [ref] = refs
    ref[pool] = jnp.clip(count, 0, MAX_DROPPED).astype(ref.dtype)


def _clear(slots: int, first: Array, pool: Any, refs: Sequence[Any]) -> None:
    """Write zeros into the slots from `first` on."""

    def step(i: Array, _: None) -> None:
        at = first + i * _AT_ONCE + lax.broadcasted_iota(jnp.int32, (_AT_ONCE,), 0)
        for ref in refs:
            plt.store(ref.at[pool, at], jnp.zeros((_AT_ONCE,), ref.dtype), mask=at < slots)

    lax.fori_loop(0, lax.div(slots - first + _AT_ONCE - 1, _AT_ONCE), step, None)
