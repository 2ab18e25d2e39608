"""Sparse outliers: entries that dense codes cannot hold, stored beside them as residuals, in a
fixed number of slots.

    x^[t, k, h] = dense[t, k, h] + residual[p, e]

for the slot e of t's pool p whose place is (t, k, h).

A pool is a run of neighbouring tokens whose heads share its slots. The data decide how many
outliers a token or a head has, but the number varies much less between pools. The slots of a pool
are sorted by head, then token, then channel. ends[p, k] is the first slot behind the slots of
head k, and index[p, e] = (t within the pool) * H + h. Slots behind ends[p, -1] are unused and hold
zeros. Source: the dense-and-sparse representation of Hooper et al., KVQuant, sections 3.4 and 3.7,
here in a shape that does not depend on the data.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt16

from kvq_jax.arrays.stored import BodySpec
from kvq_jax.arrays.uniform import NEAR, OutOfRange
from kvq_jax.types.array_types import Axis
from kvq_jax.types.pytree import describe, pytree
from pallas_kernels.tiles.layout import SPAN

MAX_PLACES = 1 << 16  # of a pool and head: indices have 16 bits
MAX_SLOTS = (1 << 16) - 1  # of a pool: `ends` and `dropped` have 16 bits
MAX_POOL = 128


@pytree
@dataclasses.dataclass(frozen=True)
class SparseOutliers:
    """P slots for each of n pools.

    index: [B, n, P] uint16.
    residual: [B, n, P].
    ends: [B, n, K] uint16.
    dropped: [B, n] uint16, the outliers of a pool that have no slot (65535: that many or more).
        None if every outlier has one.
    """

    index: UInt16[Array, "B n P"]
    residual: Float[Array, "B n P"]
    ends: UInt16[Array, "B n K"]
    dropped: UInt16[Array, "B n"] | None


@dataclasses.dataclass(frozen=True)
class Pool:
    """The size of a pool: `tokens` that share `slots`.

    overflows: True if they may have more outliers, which are counted.
    """

    tokens: int
    slots: int
    overflows: bool


def outliers_per_side(fraction: float, width: int) -> int:
    """Return the number of outliers on each side of a vector of `width` entries.

    They are the entries on or beyond its linearly interpolated quantile of order 1 - fraction / 2,
    1 + floor((width - 1) * fraction / 2) of them: 21 of 4096 entries for 0.01. There are 0 if the
    fraction is less than one entry (`smallest_fraction` is the least that is not). Raises
    ValueError if the fraction is negative or not below 0.5.
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"outliers={fraction:g} must be 0, or a fraction below 0.5")
    return 1 + math.floor((width - 1) * fraction / 2) if fraction * width >= 1 else 0


def smallest_fraction(width: int) -> float:
    """Return the smallest fraction, to five digits, that is at least one of `width` entries."""
    return math.ceil(1e5 / width) / 1e5


def pool_of(block: int, per_token: float, channels: int, overflows: bool) -> Pool:
    """Return the pool of a block of tokens, with `per_token` slots for each token, rounded up.

    A pool spans the block, or its largest part of at most 128 tokens that 16 bits can count. If
    kernels read the block, it is a power of two.

    Args:
        block: tokens of a block.
        per_token: slots for each token over its heads.
        channels: H.
        overflows: True if a pool may have more outliers than slots.

    Raises ValueError if not even one token fits.
    """

    def fits(tokens: int) -> bool:
        divides = block % tokens == 0 and (block % SPAN > 0 or tokens & (tokens - 1) == 0)
        return (
            divides
            and tokens * channels <= MAX_PLACES
            and math.ceil(tokens * per_token) <= MAX_SLOTS
        )

    fitting = [tokens for tokens in range(1, MAX_POOL + 1) if fits(tokens)]
    if not fitting:
        raise ValueError(
            f"outliers of heads of {channels} channels, {per_token:g} for each token, do not fit"
            " 16-bit indices"
        )
    return Pool(fitting[-1], math.ceil(fitting[-1] * per_token), overflows)


def specs(batch: int, heads: int, tokens: int, pool: Pool, dtype: str) -> SparseOutliers:
    """Describe the arrays of a body of `tokens` tokens, which are whole pools."""
    pools = Axis("batch", batch), Axis("tokens", tokens, per=pool.tokens)
    index, residual = (
        BodySpec((*pools, Axis("none", pool.slots)), kind) for kind in ("uint16", dtype)
    )
    ends = BodySpec((*pools, Axis("kv_heads", heads)), "uint16")
    dropped = BodySpec(pools, "uint16") if pool.overflows else None
    return describe(SparseOutliers, index=index, residual=residual, ends=ends, dropped=dropped)


def collect(
    residual: Float[Array, "B K T H"], mask: Bool[Array, "B K T H"], pool: Pool, dtype: str
) -> SparseOutliers:
    """Collect the masked entries of whole pools into slots. A pool with too many keeps those with
    the largest residuals."""
    heads, places = residual.shape[1], pool.tokens * residual.shape[3]
    flat, wanted = _by_pool(residual, pool), _by_pool(mask, pool)
    size, place = lax.top_k(jnp.where(wanted, jnp.abs(flat), -1.0), pool.slots)
    used = size >= 0
    limit = float(jnp.finfo(dtype).max)
    values = jnp.where(used, jnp.clip(jnp.take_along_axis(flat, place, axis=-1), -limit, limit), 0)
    place, values = lax.sort((jnp.where(used, place, heads * places), values), num_keys=1)
    ends = jnp.sum(
        place[..., None] < places * jnp.arange(1, heads + 1, dtype=jnp.int32)[None, None, None],
        axis=2,
    )
    index = jnp.where(place < heads * places, place % places, 0)
    dropped = None
    if pool.overflows:
        dropped = jnp.clip(jnp.sum(wanted, axis=-1) - pool.slots, 0, MAX_SLOTS).astype(jnp.uint16)
    return SparseOutliers(
        index.astype(jnp.uint16), values.astype(dtype), ends.astype(jnp.uint16), dropped
    )


def add(dense: Float[Array, "B K T H"], outliers: SparseOutliers) -> Float[Array, "B K T H"]:
    """Return dense rows with the residuals added.

    Unused slots point beyond the last head, and a scatter drops them.
    """
    batch, _, tokens, channels = dense.shape
    pools, slots = outliers.index.shape[1:]
    head, index = heads_of(outliers.ends, slots), outliers.index.astype(jnp.int32)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    first = (tokens // pools * jnp.arange(pools, dtype=jnp.int32))[None, :, None]
    place = rows, head, first + index // channels, index % channels
    return dense.at[place].add(outliers.residual.astype(dense.dtype), mode="drop")


def heads_of(ends: UInt16[Array, "B n K"], slots: int) -> Int[Array, "B n {slots}"]:
    """Return the head of each slot, K for an unused one."""
    return jnp.sum(
        jnp.arange(slots, dtype=jnp.int32)[None, None, :, None]
        >= ends.astype(jnp.int32)[:, :, None],
        axis=-1,
        dtype=jnp.int32,
    )


def out_of_range(outliers: SparseOutliers) -> OutOfRange:
    """Return which pools have a residual at the end of its dtype."""
    limit = NEAR * float(jnp.finfo(outliers.residual.dtype).max)
    large = jnp.any(jnp.abs(outliers.residual.astype(jnp.float32)) >= limit, axis=2)
    return OutOfRange(large, jnp.zeros_like(large))


def counts(outliers: SparseOutliers) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
    """Return (outliers with a slot, outliers without one) of each pool.

    More than 65535 outliers without a slot count as 65535.
    """
    kept = outliers.ends[:, :, -1].astype(jnp.int32)
    return kept, (
        jnp.zeros_like(kept) if outliers.dropped is None else outliers.dropped.astype(jnp.int32)
    )


def _by_pool(rows: Array, pool: Pool) -> Array:
    """Lay the heads, tokens and channels of each pool side by side, in this order.

    [B, K, T, H] -> [B, n, K * U * H].
    """
    batch, heads, tokens, channels = rows.shape
    pools = tokens // pool.tokens
    cut = rows.reshape(batch, heads, pools, pool.tokens, channels)
    return jnp.swapaxes(cut, 1, 2).reshape(batch, pools, heads * pool.tokens * channels)
