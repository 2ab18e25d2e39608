"""Decode attention over the full-precision windows of a cache, in one launch: the sink's first tokens and the ring's newest ones.

    m, l, o of  softmax(q . K^T / sqrt(H)) V  over the tokens that no body holds, as one split (partial_attention.py)

A ring of R slots after E sink tokens holds token p in slot (p - E) mod R. Of n tokens, limits[b] after the sink are read from the body, and
the ring's other tokens here. One program reads both windows of a KV head for all of its query heads, a tile of slots after the other.

Keys cached before RoPE are rotated to their positions p as they are read, in fp32, for a slot's position is known where it is read:

    k_rot = a (k1 cos(p w) - k2 sin(p w), k2 cos(p w) + k1 sin(p w)),    k1, k2 the halves of a key's channels
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.angles import Units, at_positions, units_per_position
from pallas_kernels.decode_attention.partial_attention import NEG_INF, WEIGHT_EXPONENT, Splits
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.readers.shared import LOG2E, add_up, dot, real_columns
from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.triton_call import triton_call, whole_array_but

DTYPES = ("bfloat16", "float16")
_TILE_ELEMENTS = 8192  # of the keys of one tile
_LEAST_ROWS = 16  # of a tile: tensor cores take no fewer, so a smaller window is read with its last slot repeated

Sink = tuple[Float[Array, "B K E H"], Float[Array, "B K E H"]]  # keys and values
Ring = tuple[Float[Array, "B K R H"], Float[Array, "B K R H"]]
Rotation = tuple[Float[Array, " half"], Float[Array, ""]]  # inverse frequencies w and attention factor a, fp32


def attend_windows(
    q: Float[Array, "B K G H"],
    sink: Sink,
    ring: Ring,
    tokens: Int[Array, " B"],
    limits: Int[Array, " B"],
    *,
    rotation: Rotation | None = None,
    launch: Launch = LAUNCH,
) -> Splits:
    """Attend with one query token of each sequence to the tokens of its windows that the body does not hold.

    q: not scaled. sink, ring: bfloat16 or float16, of any number of slots; a sink may have none. tokens [B]: that the row has, the query's
    own included; limits [B]: of them in the body. rotation: of keys cached before RoPE; None for keys after it. Rounds q, rotated keys and
    probabilities to the windows' dtype; scores and sums are fp32. What slots without a token hold is never used. Raises ValueError for
    other dtypes and for a ring without slots.
    """
    batch, heads, group, channels = q.shape
    slots, dtype = (sink[0].shape[2], ring[0].shape[2]), ring[0].dtype
    if dtype.name not in DTYPES:
        raise ValueError(f"windows in {dtype.name}: kernels read {' and '.join(DTYPES)}")
    if not slots[1]:
        raise ValueError("a ring of 0 slots: the newest token needs one")
    columns, real = max(8, pl.next_power_of_2(group)), pl.next_power_of_2(group)
    padded = jnp.pad(q.astype(dtype), ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    shared = [] if rotation is None else [*units_per_position(rotation[0]), rotation[1].reshape(1)]
    arrays = [padded, *(sink if slots[0] else ()), *ring]
    shapes = [jax.ShapeDtypeStruct((batch, heads, 1, *rest), jnp.float32) for rest in ((real,), (real,), (channels, real))]
    parts = triton_call(
        functools.partial(_kernel, slots=slots, rotates=rotation is not None, asm=launch.asm),
        name="attend_windows",
        grid=(batch, heads, 1),
        in_specs=[
            *[pl.BlockSpec((1,), lambda b, k, s: (b,))] * 2,
            *(whole_array_but(0, array, ()) for array in shared),
            *(whole_array_but(2, array, (0, 1)) for array in arrays),
        ],
        out_specs=[whole_array_but(3, shape, (0, 1, 2)) for shape in shapes],
        out_shape=shapes,
        launch=launch,
        num_warps=4 if rotation is None else 8,  # rotating takes four times as many instructions as all the rest
        num_stages=2,
    )(tokens.astype(jnp.int32), limits.astype(jnp.int32), *shared, *arrays)
    return Splits(*parts)


class Held(NamedTuple):
    """The position of the token that a slot holds, and whether it is one of those that are read here."""

    position: Int[Array, " tile"]
    counts: Bool[Array, " tile"]


def _kernel(tokens_ref: Any, limit_ref: Any, *refs: Any, slots: tuple[int, int], rotates: bool, asm: bool) -> None:
    # refs: if keys are rotated, the units of H/2 frequencies, whole and rest, and the attention factor; q [columns, H]; keys and values of
    # the sink, if it has slots, then of the ring; m [R], l [R] and o [H, R]
    left, units, factor, parts = list(refs), None, 1.0, 1
    if rotates:
        whole_ref, rest_ref, factor_ref, *left = left
        units, factor, parts = Units(whole_ref[...], rest_ref[...]), factor_ref[0], 2
    q_ref, *windows, m_ref, l_ref, o_ref = left
    columns, channels = q_ref.shape
    cuts = [pl.ds(part * (channels // parts), channels // parts) for part in range(parts)]  # of the channels: halves of keys to rotate
    queries, scale = [q_ref[:, cut] for cut in cuts], factor * (LOG2E * channels**-0.5)
    first, tokens, limit = slots[0], tokens_ref[0], limit_ref[0]

    def of_sink(slot: Int[Array, " tile"]) -> Held:
        return Held(slot, slot < tokens)

    def of_ring(slot: Int[Array, " tile"]) -> Held:
        count, newest = slots[1], tokens - 1
        turns = (first // count + 2) * count  # so that the remainder is one of a number that is not negative
        position = newest - lax.rem(newest - first - slot + turns, jnp.full_like(slot, count))
        return Held(position, position >= first + limit)

    carry = jnp.zeros((channels, columns), jnp.float32), jnp.full((columns,), NEG_INF, jnp.float32), jnp.zeros((columns,), jnp.float32)
    readable = [(slots[0], of_sink)] if slots[0] else []
    for (count, holds), (k_ref, v_ref) in zip([*readable, (slots[1], of_ring)], zip(windows[::2], windows[1::2], strict=True), strict=True):
        tile = min(max(_LEAST_ROWS, 1 << (count.bit_length() - 1)), _TILE_ELEMENTS // channels)

        def step(i: Array, carry: Any, count=count, holds=holds, k_ref=k_ref, v_ref=v_ref, tile=tile) -> Any:
            sums, largest, total = carry
            slot, rows, fresh = _slots(i, tile, count)
            held = holds(slot)
            counts = (held.counts & fresh)[:, None]
            keys = [k_ref[rows, cut] for cut in cuts]
            if units is not None:
                keys = _rotated(keys, *at_positions(held.position, units))
            scores = add_up(dot(k, q, (1, 1)) for k, q in zip(keys, queries, strict=True)) * scale
            scores = jnp.where(counts, scores, NEG_INF)
            new = jnp.maximum(largest, jnp.max(scores, axis=0) - WEIGHT_EXPONENT)
            weights = jnp.where(counts, exp2(scores - new[None, :], asm), 0.0)
            values = jnp.where(counts, v_ref[rows, slice(None)], 0)
            shrink = exp2(largest - new, asm)
            sums = sums * shrink[None, :] + dot(values, weights.astype(values.dtype), (0, 0))
            return sums, new, total * shrink + jnp.sum(weights, axis=0)

        carry = lax.fori_loop(0, pl.cdiv(count, tile), step, carry)
    sums, largest, total = carry
    heads = m_ref.shape[0]
    o_ref[...] = real_columns(sums, heads)
    m_ref[...], l_ref[...] = (real_columns(x[None], heads).reshape(heads) for x in (largest, total))


def _slots(i: Array, tile: int, count: int) -> tuple[Int[Array, " tile"], Any, Bool[Array, " tile"]]:
    """Return the slots of the i-th tile of a window, the index of the rows that are read for them, and which of them are read first now."""
    start = jnp.minimum(i * tile, max(count - tile, 0))  # the last tile moves back; what an earlier one read does not count again
    slot = start + lax.broadcasted_iota(jnp.int32, (tile,), 0)
    rows = pl.ds(start, tile) if tile <= count else jnp.minimum(slot, count - 1)
    return slot, rows, (slot >= i * tile) & (slot < count)


def _rotated(
    halves: Sequence[Float[Array, "tile half"]], cos: Float[Array, "tile half"], sin: Float[Array, "tile half"]
) -> list[Float[Array, "tile half"]]:
    """Return the halves of keys after RoPE, in the dtype of those before it and without the attention factor."""
    first, second = (half.astype(jnp.float32) for half in halves)
    return [half.astype(halves[0].dtype) for half in (first * cos - second * sin, second * cos + first * sin)]
