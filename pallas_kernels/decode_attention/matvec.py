"""The two matrix-vector products of decode attention by themselves, over packed words, without
softmax.

    scores            q . K^T     [B, K, G, S]
    weighted_values   p . V       [B, K, G, H]

They are the work that attention does around its softmax, and what the tables of the InnerQ paper
time. They take any reader. InnerQ groups keys along "channels" and values along "tokens". The
opposite is outer grouping (KIVI).

Contract. All S tokens of the capacity are read, so all of them must be finite. S is a multiple of
the tile, and of a group's tokens if groups run over tokens. The tile is a power of two, at least
32. Query heads are padded to a power of two in memory, and to 8 columns inside the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.decode_attention.merge import merged
from pallas_kernels.decode_attention.partial_attention import NEG_INF
from pallas_kernels.decode_attention.tuning import TUNING, Tuning
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.shared import LOG2E
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.triton_call import triton_call, whole_array_but

_WHOLE = pl.BlockSpec((1,), lambda *_: (0,))


def scores_tuning(reader: Reader, capacity: int) -> Tuning:
    """Return the default tuning for `scores`."""
    return Tuning(tile=reader.scores_tile if capacity % reader.scores_tile == 0 else 64)


def scores(
    q: Float[Array, "B K G H"],
    reader: Reader,
    stored: Sequence[Array],
    *,
    capacity: int,
    tuning: Tuning | None = None,
    launch: Launch = LAUNCH,
) -> Float[Array, "B K G S"]:
    """Return q . k of every stored token, fp32, not scaled by sqrt(H).

    Rounds as attention does: q to fp16, or to the rows' dtype if they are in full precision.
    """
    batch, heads, group, channels = q.shape
    tuning = tuning or scores_tuning(reader, capacity)
    _check(capacity, tuning)
    rows, columns = _padded(group)
    # Readers scale as attention does, so undo that first.
    unscaled = _pad_heads(q.astype(jnp.float32) * (channels**0.5 / LOG2E), rows)
    # Real heads are columns / rows apart, so that a reshape separates them from the padding.
    spread = jnp.pad(
        unscaled[:, :, :, None], ((0, 0),) * 3 + ((0, columns // rows - 1), (0, 0))
    ).reshape(batch, heads, columns, channels)
    query, arrays = reader.query(spread, stored), reader.arrays(stored)
    splits = tuning.splits(batch * heads, capacity)
    shape = jax.ShapeDtypeStruct(
        (batch, heads, *_by_slots(rows, capacity, reader.slots)), jnp.float32
    )
    [padded] = triton_call(
        functools.partial(
            _scores_kernel, reader=reader, query_arrays=len(query), tuning=tuning, asm=launch.asm
        ),
        name="matvec_scores",
        grid=(batch, heads, splits),
        in_specs=[
            _WHOLE,
            *(whole_array_but(2, array, (0, 1), (batch, heads)) for array in (*query, *arrays)),
        ],
        out_specs=[whole_array_but(2, shape, (0, 1))],
        out_shape=[shape],
        launch=launch,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )(_tiles(capacity, tuning), *query, *arrays)
    real = padded.reshape(batch, heads, rows, capacity)[:, :, :group]
    more = reader.more_scores(
        q.astype(jnp.float32), stored, jnp.full((batch,), capacity), launch, group
    )
    return real if more is None else real + more


def weighted_values(
    p: Float[Array, "B K G S"],
    reader: Reader,
    stored: Sequence[Array],
    *,
    tuning: Tuning = TUNING,
    launch: Launch = LAUNCH,
) -> Float[Array, "B K G H"]:
    """Return sum_t p_t v_t over every stored token, fp32.

    Args:
        p: weights of any float dtype, rounded to fp16, or to the rows' dtype if they are in full
            precision. They must not be negative if values have outliers.
    """
    batch, heads, group, capacity = p.shape
    _check(capacity, tuning)
    rows, columns = _padded(group)
    weights = _pad_heads(p, rows).reshape(batch, heads, *_by_slots(rows, capacity, reader.slots))
    arrays = reader.arrays(stored)
    splits = tuning.splits(batch * heads, capacity)
    count, width = reader.chunks
    shape = jax.ShapeDtypeStruct((batch, heads, splits, count, width, columns), jnp.float32)
    [partial_sums] = triton_call(
        functools.partial(
            _values_kernel, reader=reader, tuning=tuning, columns=columns, asm=launch.asm
        ),
        name="matvec_values",
        grid=(batch, heads, splits),
        in_specs=[
            _WHOLE,
            *(whole_array_but(2, array, (0, 1), (batch, heads)) for array in (weights, *arrays)),
        ],
        out_specs=[whole_array_but(3, shape, (0, 1, 2))],
        out_shape=[shape],
        launch=launch,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )(_tiles(capacity, tuning), weights, *arrays)
    total = jnp.sum(partial_sums, axis=2)[..., :: columns // rows]  # [B, K, C, W, rows]
    real = jnp.moveaxis(total, 4, 2).reshape(batch, heads, rows, count * width)[:, :, :group]
    return (
        real + weighted_outliers(p, reader, stored, launch=launch) if reader.adds_values else real
    )


def weighted_outliers(
    p: Float[Array, "B K G S"], reader: Reader, stored: Sequence[Array], *, launch: Launch = LAUNCH
) -> Float[Array, "B K G H"]:
    """Return the contribution of outliers (`Reader.adds_values`) to `weighted_values`, fp32. p must
    not be negative.
    """
    batch, _, group, capacity = p.shape
    exponents = _pad_heads(jnp.maximum(jnp.log2(p.astype(jnp.float32)), NEG_INF), _padded(group)[0])
    part = merged(
        reader.more_values(exponents, stored, jnp.full((batch,), capacity), launch),
        group,
        launch=launch,
    )
    return jnp.exp(part.m) * part.o


def _check(capacity: int, tuning: Tuning) -> None:
    if tuning.tile % SPAN or capacity % tuning.tile:
        raise ValueError(
            f"{capacity=} is not whole tiles of {tuning.tile} tokens, or those are not whole spans"
            f" of {SPAN}"
        )


def _padded(group: int) -> tuple[int, int]:
    """Return (rows, columns): the number of query heads per KV head as padded in memory and in the
    kernel.
    """
    rows = pl.next_power_of_2(group)
    return rows, max(8, rows)


def _pad_heads(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)))


def _by_slots(rows: int, capacity: int, slots: int) -> tuple[int, ...]:
    """Return the shape of one number per head and token in which a slot's tokens can be indexed."""
    return (rows, capacity) if slots == 1 else (rows, capacity // SPAN, slots, SPAN // slots)


def _slot_index(tile: Tile, slots: int, slot: int) -> tuple[Any, ...]:
    """Return the index of a slot's tokens in an array of that shape."""
    if slots == 1:
        return slice(None), pl.ds(tile.offset(1), tile.size)
    return slice(None), pl.ds(tile.offset(SPAN), tile.size // SPAN), slot, slice(None)


def _tiles(capacity: int, tuning: Tuning) -> Array:
    """Return the number of tiles as an array for kernels to read.

    If it were a constant, the compiler would work out all offsets and see through
    `PairedWords.zero`.
    """
    return jnp.full((1,), capacity // tuning.tile, jnp.int32)


def _tiles_of_split(tiles: Array) -> tuple[Array, Array]:
    per_split = pl.cdiv(tiles, pl.num_programs(2))
    first = pl.program_id(2) * per_split
    return first, jnp.minimum(first + per_split, tiles)


def _scores_kernel(
    tiles_ref: Any, *refs: Any, reader: Reader, query_arrays: int, tuning: Tuning, asm: bool
) -> None:
    # refs: query arrays, stored arrays, then the scores [rows, S] (by slots) of a KV head
    query, arrays, out_ref = refs[:query_arrays], refs[query_arrays:-1], refs[-1]
    heads, query, arrays = out_ref.shape[0], reader.opened(query), reader.opened_arrays(arrays, asm)

    def step(i: Array, carry: tuple[()]) -> tuple[()]:
        tile = Tile(tuning.tile, i * tuning.tile, i)
        for slot, of_slot in enumerate(reader.scores(query, arrays, tile, asm)):
            tokens, columns = of_slot.shape
            real = jnp.swapaxes(of_slot, 0, 1)
            if columns > heads:
                column = lax.broadcasted_iota(jnp.int32, (1, columns // heads, 1), 1)
                real = jnp.sum(
                    jnp.where(column == 0, real.reshape(heads, columns // heads, tokens), 0.0),
                    axis=1,
                )
            shape = (
                (heads, tokens)
                if reader.slots == 1
                else (heads, tuning.tile // SPAN, SPAN // reader.slots)
            )
            out_ref[_slot_index(tile, reader.slots, slot)] = real.reshape(shape)
        return carry

    lax.fori_loop(*_tiles_of_split(tiles_ref[0]), step, ())


def _values_kernel(
    tiles_ref: Any,
    weight_ref: Any,
    *refs: Any,
    reader: Reader,
    tuning: Tuning,
    columns: int,
    asm: bool,
) -> None:
    # refs: weights [rows, S] (by slots) and stored arrays of a KV head, then the sums [C, W,
    # columns] of this program's split
    arrays, out_ref = reader.opened_arrays(refs[:-1], asm), refs[-1]
    heads, tokens = weight_ref.shape[0], tuning.tile // reader.slots

    def weights(tile: Tile, slot: int) -> Array:
        of_slot = (
            weight_ref[_slot_index(tile, reader.slots, slot)]
            .astype(jnp.float32)
            .reshape(heads, 1, tokens)
        )
        return jnp.swapaxes(
            jnp.broadcast_to(of_slot, (heads, columns // heads, tokens)).reshape(columns, tokens),
            0,
            1,
        )

    def step(i: Array, sums: list[Array]) -> list[Array]:
        tile = Tile(tuning.tile, i * tuning.tile, i)
        return reader.weigh(
            [weights(tile, slot) for slot in range(reader.slots)], arrays, tile, sums, asm
        )

    count, width = reader.chunks
    sums = lax.fori_loop(
        *_tiles_of_split(tiles_ref[0]), step, [jnp.zeros((width, columns), jnp.float32)] * count
    )
    for c in range(count):
        out_ref[c, :, :] = sums[c]
