"""Exact outliers beside dense codes: a few slots of (flat channel, residual) for each token, over the KV width of all heads.

    scores    + sum over a token's slots of a head   residual * q[channel]
    values    + sum over tokens and their slots      p * residual at the channel

Slots are sorted by channel, so those of a head are neighbours; but where they begin differs from token to token. One pass over the slots,
a thread for each token, finds everything that depends on it and is the same for a whole step: the outliers' part of all scores, or where
the slots of each head begin. So no slot is read once for each head. What a thread has so far for a head is stored again with each slot;
the last one stays. No atomics, and the result does not depend on the order of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, Int16, UInt16

from pallas_kernels._launch import Launch, launch, whole_array_but
from pallas_kernels.parts import as_float, dot
from pallas_kernels.planes import equal, half_multiply
from pallas_kernels.tile import SPAN

MOST_SLOTS = 255  # a byte counts them
TOKENS = 128  # of a program, a thread each


class Turn(NamedTuple):
    """Cosines and sines, [spans, H/2] of the position of every span's first token and [SPAN, H/2] of the distance from it; fp32."""

    start_cos: Float[Array, "spans half"]
    start_sin: Float[Array, "spans half"]
    cos: Float[Array, "32 half"]
    sin: Float[Array, "32 half"]


def turn(frequencies: Float[Array, " half"], sink: int, tokens: int) -> Turn:
    angles = [p.astype(jnp.float32)[:, None] * frequencies[None] for p in (sink + SPAN * jnp.arange(tokens // SPAN), jnp.arange(SPAN))]
    return Turn(*(f(a) for a in angles for f in (jnp.cos, jnp.sin)))


def outlier_scores(
    q: Float[Array, "B K G H"],
    index: UInt16[Array, "B E S"],
    residual: Array,
    limits: Int[Array, " B"],
    turned: Turn | None,
    how: Launch,
) -> Float[Array, "B K G S"]:
    """sum over slots of residual * q[channel], fp32; for tokens from limits[b] on whatever it may be. `turned`: residuals belong to keys
    before RoPE, which stand at those positions."""
    batch, heads, group, channels = q.shape
    shape = jax.ShapeDtypeStruct((batch, heads, group, index.shape[2]), jnp.float32)
    tables = () if turned is None else (t[None] for t in turned)
    kernel = functools.partial(_scores_kernel, heads=heads, group=group, channels=channels)
    return _over_slots(kernel, "outlier_scores", shape, (index, residual, q.astype(jnp.float32), *tables), limits, how)


def head_ranges(index: UInt16[Array, "B E S"], heads: int, channels: int, limits: Int[Array, " B"], how: Launch) -> Int16[Array, "B K S"]:
    """first slot | number of slots << 8 of each head and token; for tokens from limits[b] on whatever it may be."""
    shape = jax.ShapeDtypeStruct((index.shape[0], heads, index.shape[2]), jnp.int16)
    return _over_slots(functools.partial(_ranges_kernel, heads=heads, channels=channels), "outlier_ranges", shape, (index,), limits, how)


def _over_slots(kernel: Any, name: str, shape: jax.ShapeDtypeStruct, arrays: Sequence[Array], limits: Array, how: Launch) -> Array:
    tokens = shape.shape[-1]
    step = min(TOKENS, tokens & -tokens)
    [found] = launch(
        functools.partial(kernel, step=step),
        name=name,
        grid=(shape.shape[0], tokens // step),
        in_specs=[
            pl.BlockSpec((1,), lambda b, t: (b,)),
            *(whole_array_but(1, array, (0,)) for array in arrays),
            whole_array_but(1, shape, (0,)),
        ],
        out_specs=[whole_array_but(1, shape, (0,))],
        out_shape=[shape],
        how=how,
        num_warps=max(1, step // 32),
        num_stages=1,
        aliases={1 + len(arrays): 0},  # zeros, where a token has no slot of a head
    )(limits.astype(jnp.int32), *arrays, jnp.zeros(shape.shape, shape.dtype))
    return found


def _live_slots(limit_ref: Any, index_ref: Any, step: int) -> tuple[Array, Array]:
    """(this program's tokens, how many slots it has to read: none where no token counts)."""
    start = pl.program_id(1) * step
    return start + lax.broadcasted_iota(jnp.int32, (step,), 0), jnp.where(start < limit_ref[0], index_ref.shape[0], 0)


def _scores_kernel(
    limit_ref: Any, index_ref: Any, residual_ref: Any, q_ref: Any, *refs: Any, heads: int, group: int, channels: int, step: int
) -> None:
    # index, residual [E, S], q [K, G, H], the tables of a Turn or nothing, zeros, then the scores [K, G, S]
    *tables, _, out_ref = refs
    tokens, slots = _live_slots(limit_ref, index_ref, step)
    half = channels // 2

    def body(e: Array, carry: Any) -> Any:
        before, sums = carry
        index = index_ref[e, tokens].astype(jnp.int32)
        residual = as_float(residual_ref[e, tokens], "float16").astype(jnp.float32)
        real = index < heads * channels
        head, channel = jnp.where(real, index // channels, 0), index % channels
        if tables:
            pair = channel % half
            cos_a, sin_a = (table[tokens // SPAN, pair] for table in tables[:2])
            cos_b, sin_b = (table[tokens % SPAN, pair] for table in tables[2:])
            cos = residual * (cos_a * cos_b - sin_a * sin_b)
            sin = jnp.where(channel < half, residual, -residual) * (sin_a * cos_b + cos_a * sin_b)
        found = []
        for g in range(group):
            new = residual * q_ref[head, g, channel]
            if tables:
                new = cos * q_ref[head, g, channel] + sin * q_ref[head, g, (channel + half) % channels]
            found.append(jnp.where(index // channels == before, sums[g], 0.0) + new)
            plt.store(out_ref.at[head, g, tokens], found[g], mask=real)
        return index // channels, found

    lax.fori_loop(0, slots, body, (jnp.full((step,), -1, jnp.int32), [jnp.zeros((step,), jnp.float32)] * group))


def _ranges_kernel(limit_ref: Any, index_ref: Any, _: Any, out_ref: Any, *, heads: int, channels: int, step: int) -> None:
    # index [E, S], zeros, then the ranges [K, S]
    tokens, slots = _live_slots(limit_ref, index_ref, step)

    def body(e: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        before, first = carry
        index = index_ref[e, tokens].astype(jnp.int32)
        head = index // channels
        first = jnp.where(head == before, first, e)
        found = (first | (e + 1 - first) << 8).astype(jnp.int16)
        real = index < heads * channels
        plt.store(out_ref.at[jnp.where(real, head, 0), tokens], found, mask=real)
        return head, first

    lax.fori_loop(0, slots, body, (jnp.full((step,), -1, jnp.int32), jnp.zeros((step,), jnp.int32)))


def weigh_outliers(
    weights: Float[Array, "rows GP"],
    refs: tuple[Any, Any, Any],
    ranges: Int[Array, " rows"],
    tokens: Int[Array, " rows"],
    sums: list[Float[Array, "W GP"]],
    asm: bool,
) -> list[Array]:
    """`sums` plus weights * residuals of the slots that `ranges` (0: none) gives each row. refs: the head's first channel [1], index and
    residual [E, S]; tokens: where a row's slots are.

    In the n-th round every row takes its n-th slot, and its channel is two numbers: the chunk, which keeps or clears the row's weights,
    and the place in the chunk, a row of zeros and a one. So a round costs a dot of all rows and chunks.
    """
    first_ref, index_ref, residual_ref = refs
    begin, count = ranges & 255, (ranges >> 8) & 255
    width, columns = sums[0].shape
    half = weights.astype(jnp.float16)
    places = jnp.broadcast_to(lax.broadcasted_iota(jnp.int32, (1, width), 1).astype(jnp.float16), (begin.shape[0], width))

    def spread(row: Array, size: int) -> Array:
        return jnp.broadcast_to(row.astype(jnp.float16)[:, None], (begin.shape[0], size))

    def a_round(n: Array, sums: list[Array]) -> list[Array]:
        has = n < count
        slot = jnp.where(has, begin + n, 0)
        channel = plt.load(index_ref.at[slot, tokens], mask=has, other=0).astype(jnp.int32) - first_ref[0]
        residual = plt.load(residual_ref.at[slot, tokens], mask=has, other=0)
        residual = as_float(residual, "float16").astype(jnp.float32)
        one = equal(spread(channel % width, width), places, asm)
        found = []
        for c, total in enumerate(sums):
            kept = jnp.where(has & (channel // width == c), residual, 0.0)
            found.append(total + dot(one, half_multiply(half, spread(kept, columns), asm), (0, 0)))
        return found

    # Inside of a condition, though a loop of no rounds would do: a loop at the top of another keeps the outer one's loads from being
    # asynchronous.
    most = jnp.max(count)
    return lax.cond(most > 0, lambda: lax.fori_loop(0, most, a_round, sums), lambda: sums)
