"""Decode attention over the full-precision windows of a cache, in one launch: the sink's first tokens and the ring's newest ones.

    m, l, o of  softmax(q . K^T / sqrt(H)) V  over the tokens that no body holds, as one split (partial_attention.py)

A ring of R slots after E sink tokens holds token p in slot (p - E) mod R. Of n tokens, limits[b] after the sink are read from the body, and
the ring's other tokens here. One program reads both windows of a KV head for all of its query heads, a tile of slots after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.partial_attention import NEG_INF, WEIGHT_EXPONENT, Splits
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.readers.shared import LOG2E, dot, real_columns
from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.triton_call import triton_call, whole_array_but

LEAST_SLOTS = 16  # of a window that is not empty: tensor cores take no fewer rows
DTYPES = ("bfloat16", "float16")
_TILE_ELEMENTS = 8192  # of the keys of one tile

Sink = tuple[Float[Array, "B K E H"], Float[Array, "B K E H"]]  # keys after RoPE and values
Ring = tuple[Float[Array, "B K R H"], Float[Array, "B K R H"]]


def attend_windows(
    q: Float[Array, "B K G H"], sink: Sink, ring: Ring, tokens: Int[Array, " B"], limits: Int[Array, " B"], *, launch: Launch = LAUNCH
) -> Splits:
    """Attend with one query token of each sequence to the tokens of its windows that the body does not hold.

    q: not scaled. sink, ring: bfloat16 or float16, at least LEAST_SLOTS slots each, or none in the sink. tokens [B]: that the row has, the
    query's own included; limits [B]: of them in the body. Rounds q and probabilities to the windows' dtype; scores and sums are fp32. What
    slots without a token hold is never used. Raises ValueError for other dtypes and fewer slots.
    """
    batch, heads, group, channels = q.shape
    slots, dtype = (sink[0].shape[2], ring[0].shape[2]), ring[0].dtype
    if dtype.name not in DTYPES:
        raise ValueError(f"windows in {dtype.name}: kernels read {' and '.join(DTYPES)}")
    if any(0 < count < LEAST_SLOTS for count in slots) or not slots[1]:
        raise ValueError(f"windows of {slots[0]} and {slots[1]} slots: kernels read none or at least {LEAST_SLOTS}")
    columns, real = max(8, pl.next_power_of_2(group)), pl.next_power_of_2(group)
    padded = jnp.pad(q.astype(dtype), ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    arrays = [padded, *(sink if slots[0] else ()), *ring]
    shapes = [jax.ShapeDtypeStruct((batch, heads, 1, *rest), jnp.float32) for rest in ((real,), (real,), (channels, real))]
    parts = triton_call(
        functools.partial(_kernel, slots=slots, asm=launch.asm),
        name="attend_windows",
        grid=(batch, heads, 1),
        in_specs=[*[pl.BlockSpec((1,), lambda b, k, s: (b,))] * 2, *(whole_array_but(2, array, (0, 1)) for array in arrays)],
        out_specs=[whole_array_but(3, shape, (0, 1, 2)) for shape in shapes],
        out_shape=shapes,
        launch=launch,
        num_warps=4,
        num_stages=2,
    )(tokens.astype(jnp.int32), limits.astype(jnp.int32), *arrays)
    return Splits(*parts)


def _kernel(tokens_ref: Any, limit_ref: Any, q_ref: Any, *refs: Any, slots: tuple[int, int], asm: bool) -> None:
    # refs: keys and values of the sink, if it has slots, then of the ring; m [R], l [R] and o [H, R]
    *windows, m_ref, l_ref, o_ref = refs
    first, tokens, limit = slots[0], tokens_ref[0], limit_ref[0]
    q = q_ref[...]
    columns, channels = q.shape

    def in_sink(slot: Int[Array, " tile"]) -> Bool[Array, " tile"]:
        return slot < tokens

    def in_ring(slot: Int[Array, " tile"]) -> Bool[Array, " tile"]:
        count, newest = slots[1], tokens - 1
        turns = (first // count + 2) * count  # so that the remainder is one of a number that is not negative
        held = newest - lax.rem(newest - first - slot + turns, jnp.full_like(slot, count))
        return held >= first + limit

    carry = jnp.zeros((channels, columns), jnp.float32), jnp.full((columns,), NEG_INF, jnp.float32), jnp.zeros((columns,), jnp.float32)
    readable = [(slots[0], in_sink)] if slots[0] else []
    for (count, holds), (k_ref, v_ref) in zip([*readable, (slots[1], in_ring)], zip(windows[::2], windows[1::2], strict=True), strict=True):
        tile = min(_TILE_ELEMENTS // channels, 1 << (count.bit_length() - 1))

        def step(i: Array, carry: Any, count=count, holds=holds, k_ref=k_ref, v_ref=v_ref, tile=tile) -> Any:
            sums, largest, total = carry
            start = jnp.minimum(i * tile, count - tile)  # the last tile moves back; what an earlier one read does not count again
            slot = start + lax.broadcasted_iota(jnp.int32, (tile,), 0)
            counts = (holds(slot) & (slot >= i * tile))[:, None]
            rows = pl.ds(start, tile), slice(None)
            scores = dot(k_ref[rows], q, (1, 1)) * (LOG2E * channels**-0.5)
            scores = jnp.where(counts, scores, NEG_INF)
            new = jnp.maximum(largest, jnp.max(scores, axis=0) - WEIGHT_EXPONENT)
            weights = jnp.where(counts, exp2(scores - new[None, :], asm), 0.0)
            values = jnp.where(counts, v_ref[rows], 0)
            shrink = exp2(largest - new, asm)
            sums = sums * shrink[None, :] + dot(values, weights.astype(values.dtype), (0, 0))
            return sums, new, total * shrink + jnp.sum(weights, axis=0)

        carry = lax.fori_loop(0, pl.cdiv(count, tile), step, carry)
    sums, largest, total = carry
    heads = m_ref.shape[0]
    o_ref[...] = real_columns(sums, heads)
    m_ref[...], l_ref[...] = (real_columns(x[None], heads).reshape(heads) for x in (largest, total))
