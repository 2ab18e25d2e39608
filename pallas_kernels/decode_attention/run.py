"""Decode attention over a run of neighbouring tiles, inside the kernel (kernel.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.decode_attention.partial_attention import NEG_INF
from pallas_kernels.decode_attention.schedule import TileRun, Unit
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.shared import real_columns, soft_capped
from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.tiles.tile import Tile, change_slots
from pallas_kernels.triton_call import plt


def attend_run(
    run: TileRun,
    query: Sequence[Unit],
    keys: Sequence[Any],
    values: Sequence[Any],
    added: Sequence[Unit],
    kept: Sequence[Unit],
    readers: tuple[Reader, Reader],
    size: int,
    capacity: int,
    soft_cap: float | None,
    asm: bool,
    columns: int,
) -> tuple[list[Array], Array, Array]:
    """Return sums [W, R] for each chunk of channels, largest scores [R] and sums of weights [R] of
    a run of tiles of `size` tokens.
    """
    k, v = readers
    query, keys, values = k.opened(query), k.opened_arrays(keys, asm), v.opened_arrays(values, asm)
    first, limit = run.first, run.limit
    end = jnp.minimum(run.end * size, limit)
    (skipped, whole), tiles = run.whole(size, end // size), run.end - first

    def step(tile: Tile, carry: Any) -> Any:
        sums, largest, total = carry
        scores = k.scores(query, keys, tile, asm)
        if added:
            scores = [s + _more(added[0], tile, k.slots, a, columns) for a, s in enumerate(scores)]
        if soft_cap is not None:
            scores = [soft_capped(s, soft_cap, asm) for s in scores]
        for ref in kept:
            for a, s in enumerate(scores):
                _keep(ref, s, tile, k.slots, a)
        if tile.masked:
            scores = [
                jnp.where(tile.counts(tile.slot_tokens(k.slots, a))[:, None], s, NEG_INF)
                for a, s in enumerate(scores)
            ]
        new = jnp.maximum(
            largest, jnp.max(functools.reduce(jnp.maximum, scores), axis=0) - v.weight_exponent
        )
        shrink = exp2(largest - new, asm)
        weights = [exp2(s - new[None, :], asm) for s in scores]
        total = total * shrink + jnp.sum(functools.reduce(jnp.add, weights), axis=0)
        sums = [x * shrink[None, :] for x in sums]
        weights = weights if k.parts > 1 else change_slots(weights, v.slots)
        return v.weigh(weights, values, tile, sums, asm), new, total

    def whole_tile(i: Array, carry: Any) -> Any:
        return step(Tile(size, (first + i) * size, first + i), carry)

    def masked_tile(i: Array, carry: Any) -> Any:
        start = (first + i) * size
        # The last tile is moved back to stay inside the arrays, and masks the tokens that an
        # earlier tile has read.
        inside = jnp.minimum(start, capacity - size)
        return step(Tile(size, inside, None, start, end, lower=run.lower), carry)

    def other_tile(i: Array, carry: Any) -> Any:
        # The tile that the lower limit skips is read after the whole ones, in the loop of the last.
        return masked_tile(jnp.where(i < whole, 0, i), carry)

    def part_of_tile(i: Array, carry: Any) -> Any:
        start = (first + lax.div(i, k.parts)) * size
        return step(
            Tile(
                size,
                jnp.minimum(start, capacity - size),
                None,
                start,
                end,
                lax.rem(i, k.parts),
                k.parts,
            ),
            carry,
        )

    count, width = v.chunks
    carry = (
        [jnp.zeros((width, columns), jnp.float32)] * count,
        jnp.full((columns,), NEG_INF, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
    )
    if k.parts > 1:  # one loop for all tiles: two loops take twice as long to compile
        return lax.fori_loop(0, tiles * k.parts, part_of_tile, carry)
    carry = lax.fori_loop(skipped, whole, whole_tile, carry)
    if run.lower is None:
        return lax.fori_loop(whole, tiles, masked_tile, carry)
    return lax.fori_loop(whole - skipped, tiles, other_tile, carry)


def _rows_of_slot(tile: Tile, slot: int) -> tuple[Any, ...]:
    """Return the index of a slot's tokens in scores [R, S / SPAN, slots, SPAN / slots], for R query
    heads padded to a power of two.
    """
    return slice(None), pl.ds(tile.offset(SPAN), tile.size // SPAN), pl.ds(slot, 1), slice(None)


def _more(
    ref: Any, tile: Tile, slots: int, slot: int, columns: int
) -> Float[Array, "rows columns"]:
    """Read the scores to be added for the tokens of a slot."""
    heads, rows = ref.shape[0], tile.size // slots
    added = jnp.swapaxes(ref[_rows_of_slot(tile, slot)].reshape(heads, rows), 0, 1)
    return jnp.broadcast_to(added[:, None], (rows, columns // heads, heads)).reshape(rows, columns)


def _keep(
    ref: Any, scores: Float[Array, "rows columns"], tile: Tile, slots: int, slot: int
) -> None:
    """Store the scores of those tokens of a slot that count."""
    rows, heads = scores.shape[0], ref.shape[0]
    scores = real_columns(scores, heads)
    shape = heads, rows * slots // SPAN, 1, SPAN // slots
    counts = (
        jnp.broadcast_to(tile.counts(tile.slot_tokens(slots, slot)).reshape(1, *shape[1:]), shape)
        if tile.masked
        else None
    )
    plt.store(
        ref.at[_rows_of_slot(tile, slot)], jnp.swapaxes(scores, 0, 1).reshape(shape), mask=counts
    )


def store_piece(
    refs: Sequence[Any], place: Any, sums: Sequence[Array], largest: Array, total: Array
) -> None:
    m_ref, l_ref, o_ref = refs
    heads, width = m_ref.shape[1], sums[0].shape[0]
    for c, of_chunk in enumerate(sums):
        o_ref[place, pl.ds(width * c, width), :] = real_columns(of_chunk, heads)
    for first in range(len(sums) * width, o_ref.shape[1], width):  # channels that are not stored
        o_ref[place, pl.ds(first, width), :] = jnp.zeros((width, heads), jnp.float32)
    m_ref[place, :], l_ref[place, :] = (
        real_columns(x[None], heads).reshape(heads) for x in (largest, total)
    )
