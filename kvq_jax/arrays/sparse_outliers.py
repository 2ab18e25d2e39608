"""Sparse outliers: a fixed number of entries for each token that its dense codes cannot hold, stored beside them as residuals.

    x^[t, i] = dense[t, i] + sum over slots e with index[t, e] == i of residual[t, e]

i runs over the layer's whole KV width, all heads side by side: i = k * H + h. The slots of a token are sorted by index; an unused slot has
index 65535 and residual 0. Source: the dense-and-sparse representation of Hooper et al., KVQuant, sections 3.4 and 3.7, here in a shape
that does not depend on the data.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt16

from kvq_jax.array_types import Axis
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.pytree import describe, pytree

UNUSED = 65535


@pytree
@dataclasses.dataclass(frozen=True)
class SparseOutliers:
    """E slots for each of S tokens: index [B, E, S] uint16, residual [B, E, S].

    dropped [B, S] uint8 counts the outliers of a token that have no slot (255: that many or more); None where every outlier has one.
    """

    index: UInt16[Array, "B E S"]
    residual: Float[Array, "B E S"]
    dropped: UInt8[Array, "B S"] | None


def slots_per_side(fraction: float, width: int) -> int:
    """Return the number of outliers on each side of a vector of `width` entries.

    These are the entries on or beyond its linearly interpolated quantile of order 1 - fraction / 2. Their number is
    1 + floor((width - 1) * fraction / 2): 21 of 4096 entries for 0.01, and 0 for a fraction of 0. Raises ValueError where the fraction is
    less than one entry or not below 0.5, or where the width does not fit the indices.
    """
    if fraction == 0:
        return 0
    if not 0 < fraction < 0.5:
        raise ValueError(f"outliers={fraction:g} must be 0, or a fraction below 0.5")
    if fraction * width < 1:
        smallest = math.ceil(1e5 / width) / 1e5
        raise ValueError(f"outliers={fraction:g} is less than one of {width} values; the smallest usable fraction is {smallest:g}")
    if width > UNUSED:
        raise ValueError(f"a KV width of {width} does not fit the 16-bit indices of outliers")
    return 1 + math.floor((width - 1) * fraction / 2)


def specs(batch: int, tokens: int, slots: int, dtype: str, overflows: bool) -> SparseOutliers:
    """Describe the arrays of a body of `tokens` tokens with `slots` outliers each."""
    rows, along = Axis("batch", batch), Axis("tokens", tokens)
    index, residual = (BodySpec((rows, Axis("none", slots), along), kind) for kind in ("uint16", dtype))
    dropped = BodySpec((rows, along), "uint8") if overflows else None
    return describe(SparseOutliers, index=index, residual=residual, dropped=dropped)


def collect(residual: Float[Array, "B K T H"], mask: Bool[Array, "B K T H"], slots: int, dtype: str, overflows: bool) -> SparseOutliers:
    """Collect the masked entries into slots; where there are too many, those with the largest residuals."""
    flat, wanted = _flat(residual), _flat(mask)
    size, index = lax.top_k(jnp.where(wanted, jnp.abs(flat), -1.0), slots)
    used = size >= 0
    limit = float(jnp.finfo(dtype).max)
    values = jnp.where(used, jnp.clip(jnp.take_along_axis(flat, index, axis=-1), -limit, limit), 0)
    index, values = lax.sort((jnp.where(used, index, UNUSED), values), num_keys=1)
    dropped = jnp.clip(jnp.sum(wanted, axis=-1) - slots, 0, 255).astype(jnp.uint8) if overflows else None
    return SparseOutliers(jnp.swapaxes(index, 1, 2).astype(jnp.uint16), jnp.swapaxes(values, 1, 2).astype(dtype), dropped)


def add(dense: Float[Array, "B K T H"], outliers: SparseOutliers) -> Float[Array, "B K T H"]:
    """Return dense rows with the residuals added. Unused slots point beyond the last head, where a scatter drops them."""
    batch, _, tokens, head_dim = dense.shape
    index = outliers.index.astype(jnp.int32)
    rows, token = jnp.arange(batch)[:, None, None], jnp.arange(tokens)[None, None]
    return dense.at[rows, index // head_dim, token, index % head_dim].add(outliers.residual.astype(dense.dtype), mode="drop")


def counts(outliers: SparseOutliers) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Return (outliers with a slot, outliers without one) of each token; more than 255 without one count as 255."""
    kept = jnp.sum(outliers.index != UNUSED, axis=1, dtype=jnp.int32)
    return kept, jnp.zeros_like(kept) if outliers.dropped is None else outliers.dropped.astype(jnp.int32)


def _flat(rows: Array) -> Array:
    """Lay heads side by side: [B, K, T, H] -> [B, T, K * H]."""
    batch, _, tokens, _ = rows.shape
    return jnp.swapaxes(rows, 1, 2).reshape(batch, tokens, -1)
