"""What several sides share: reading the statistics of a tile, cutting queries into planes, the tensor-core dot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16

from pallas_kernels.tiles.layout import Planes
from pallas_kernels.tiles.tile import SPAN, Tile

LOG2E = 1.4426950408889634


def token_statistic(ref: Any, group: int, slots: int, slot: int, tile: Tile, dtype: str) -> Float[Array, " rows"]:
    """A scale or zero of each token of a slot, for one group of channels; 0 for tokens that do not count.

    Unused capacity may hold anything, and 0 * nan is nan."""
    if slots == 1:
        found = ref[group, pl.ds(tile.offset(1), tile.size)]
    else:
        found = ref[group, pl.ds(tile.offset(SPAN), tile.size // SPAN), slot, :].reshape(tile.size // slots)
    found = as_float(found, dtype)
    return jnp.where(tile.counts(tile.slot_tokens(slots, slot)), found, 0) if tile.masked else found


def by_slots(statistics: Sequence[Array], slots: int) -> list[Array]:
    """Statistics [B, K, groups, S] with the tokens of a slot on an axis of their own, for `token_statistic`. No copy."""
    if slots == 1:
        return list(statistics)
    return [s.reshape(*s.shape[:3], s.shape[3] // SPAN, slots, SPAN // slots) for s in statistics]


def channel_statistic(ref: Any, planes: Planes, chunk: int, tile: Tile, group: int, dtype: str) -> Float16[Array, "groups 1 W"]:
    """A scale or zero of each channel of a chunk, for each group of tokens in the tile, or for the one group that the tile is a part of; 0
    for groups that do not count."""
    groups = max(1, tile.size // group)
    found = as_float(ref[pl.ds(tile.offset(group), groups), pl.ds(planes.width * chunk, planes.width)], dtype).astype(jnp.float16)
    if tile.masked:
        found = jnp.where(tile.counts(group * lax.broadcasted_iota(jnp.int32, (groups, 1), 0)), found, 0)
    return found.reshape(groups, 1, planes.width)


def for_tokens(statistic: Float[Array, "groups 1 W"], rows: int) -> Float[Array, "rows W"]:
    """A statistic of groups of tokens, for each word row."""
    groups, _, width = statistic.shape
    return jnp.broadcast_to(statistic, (groups, rows // groups, width)).reshape(rows, width)


def as_float(found: Array, dtype: str) -> Array:
    return lax.bitcast_convert_type(found, jnp.dtype(dtype)) if found.dtype == jnp.uint16 else found


def query_planes(q: Float[Array, "B K GP H"], chunks: int) -> Float16[Array, "B K chunks GP W"]:
    """The scaled queries in fp16, cut into chunks of channels."""
    batch, heads, columns, channels = q.shape
    half = (q * (LOG2E * channels**-0.5)).astype(jnp.float16)
    return jnp.moveaxis(half.reshape(batch, heads, columns, chunks, channels // chunks), 3, 2)


def add_up(parts: Any) -> Array:
    return functools.reduce(jnp.add, parts)


def dot(a: Array, b: Array, contracted: tuple[int, int]) -> Float[Array, "m n"]:
    axes = (contracted[0],), (contracted[1],)
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)
