"""Helpers of readers: load the scales and zero points of a tile, cut queries into planes, and
multiply on tensor cores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16

from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.tiles.layout import SPAN, PlaneLayout
from pallas_kernels.tiles.tile import Tile

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def token_scale(
    ref: Any, group: int, slots: int, slot: int, tile: Tile, dtype: str
) -> Float[Array, " rows"]:
    """Load the scales, or zero points, of a slot's tokens for one group of channels.

    Tokens that do not count get 0, because unused capacity may hold anything, and 0 * nan is nan.
    """
    if slots == 1:
        stored = ref[group, pl.ds(tile.offset(1), tile.size)]
    else:
        stored = ref[group, pl.ds(tile.offset(SPAN), tile.size // SPAN), slot, :].reshape(
            tile.size // slots
        )
    scale = as_float(stored, dtype)
    return jnp.where(tile.counts(tile.slot_tokens(slots, slot)), scale, 0) if tile.masked else scale


def by_slots(scales: Sequence[Array], slots: int) -> list[Array]:
    """Give the tokens of a slot a separate axis in scales and zero points [B, K, groups, S], for
    `token_scale`, without a copy.
    """
    if slots == 1:
        return list(scales)
    return [s.reshape(*s.shape[:3], s.shape[3] // SPAN, slots, SPAN // slots) for s in scales]


def channel_scale(
    ref: Any, layout: PlaneLayout, chunk: int, tile: Tile, group: int, dtype: str
) -> Float16[Array, "groups 1 W"]:
    """Load the scales, or zero points, of a chunk's channels for each group of tokens in the tile,
    or for the group that holds the tile. Groups that do not count get 0.
    """
    groups = max(1, tile.size // group)
    scale = as_float(
        ref[pl.ds(tile.offset(group), groups), pl.ds(layout.width * chunk, layout.width)], dtype
    ).astype(jnp.float16)
    if tile.masked:
        scale = jnp.where(
            tile.counts(group * lax.broadcasted_iota(jnp.int32, (groups, 1), 0), group), scale, 0
        )
    return scale.reshape(groups, 1, layout.width)


def for_tokens(scale: Float[Array, "groups 1 W"], rows: int) -> Float[Array, "rows W"]:
    """Repeat the scales, or zero points, of groups of tokens for each word row.

    A single group is repeated as two. If a reshape only drops an axis, newer Triton loads words in
    the layout of a dot's operand, one at a time (docs/decisions/gpu_arithmetic.md).
    """
    groups, _, width = scale.shape
    groups = max(groups, 2)
    return jnp.broadcast_to(scale, (groups, rows // groups, width)).reshape(rows, width)


def as_float(stored: Array, dtype: str) -> Array:
    """Return the floats whose bits uint16 holds. Other arrays are returned as they are."""
    return (
        lax.bitcast_convert_type(stored, jnp.dtype(dtype)) if stored.dtype == jnp.uint16 else stored
    )


def query_planes(q: Float[Array, "B K GP H"], chunks: int) -> Float16[Array, "B K chunks GP W"]:
    """Cut the queries into chunks of channels, scaled and in fp16."""
    batch, heads, columns, channels = q.shape
    half = (q * (LOG2E * channels**-0.5)).astype(jnp.float16)
    return jnp.moveaxis(half.reshape(batch, heads, columns, chunks, channels // chunks), 3, 2)


def soft_capped(scores: Float[Array, "..."], cap: float, asm: bool) -> Float[Array, "..."]:
    """Return c tanh(s / c) of scores in units of log2, for a cap c in natural units.

    With c tanh(s / c) = c - 2 c / (1 + exp(2 s / c)) the error is c times fp32's rounding for any
    score: 1e-5 for a cap of 50. The GPU's own tanh.approx errs by 5e-4 of the score.
    """
    return LOG2E * cap - 2 * LOG2E * cap / (1 + exp2(scores * (2 / cap), asm))


def real_columns(x: Float[Array, "rows columns"], heads: int) -> Float[Array, "rows heads"]:
    """Return the first columns, which belong to real query heads. Kernels cannot slice values."""
    rows, columns = x.shape
    if columns == heads:
        return x
    copy = lax.broadcasted_iota(jnp.int32, (1, columns // heads, 1), 1)
    return jnp.sum(jnp.where(copy == 0, x.reshape(rows, columns // heads, heads), 0.0), axis=1)


def add_up(terms: Any) -> Array:
    """Add arrays up in their order."""
    return functools.reduce(jnp.add, terms)


def dot(a: Array, b: Array, contracted: tuple[int, int]) -> Float[Array, "m n"]:
    """Return the tensor-core product over the axes `contracted` of a and b, fp32."""
    axes = (contracted[0],), (contracted[1],)
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)


def dot_reordered(a: Array, b: Array, contracted: tuple[int, int]) -> Float[Array, "m n"]:
    """Return the same product as `dot`, with the contracted axes in another order, for array
    operations on scaled codes.

    In each 16, runs of 4 change places: 0, 2, 1, 3. In the usual order some versions of Triton load
    scales as matrices for tensor cores, and the resulting LLVM code keeps ptxas from computing on
    pairs (docs/decisions/gpu_arithmetic.md). Data does not move: each lane reads other places.
    """
    return dot(_reordered(a, contracted[0]), _reordered(b, contracted[1]), contracted)


def _reordered(x: Array, axis: int) -> Array:
    """Exchange the second and the third run of 4 in each 16 along an axis of a matrix."""
    rows, columns = x.shape
    runs = (
        x.reshape(rows // 16, 2, 2, 4, columns)
        if axis == 0
        else x.reshape(rows, columns // 16, 2, 2, 4)
    )
    return runs.swapaxes(axis + 1, axis + 2).reshape(rows, columns)
