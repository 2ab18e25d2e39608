"""Outliers stored beside dense codes: a few slots of (flat channel, residual) for each token, over the KV width of all heads.

    scores    + sum over a token's slots of a head   residual * q[channel]
    values    + sum over tokens and their slots      p * residual at the channel

Slots are sorted by channel, so those of a head are neighbours; but where they begin differs from token to token, and a program of the
attention kernel, which has one head, would have to search all slots or wait for the token with the most. So outliers are read apart, each
once for all heads. Scores: a thread takes a token and goes through its slots; its sum for a head so far is stored again with each slot, so
that the last one stays and no atomics are needed. Values: a scatter of the weights, which the attention kernel has stored.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.launch import Launch
from pallas_kernels.readers.shared import as_float
from pallas_kernels.readers.turn import Turn
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import triton_call, whole_array_but

TOKENS = 128  # of a program, a thread each


def outlier_scores(
    q: Float[Array, "B K G H"],
    index: UInt16[Array, "B E S"],
    residual: Array,
    limits: Int[Array, " B"],
    turned: Turn | None,
    launch: Launch,
) -> Float[Array, "B K G S"]:
    """Return the sum over slots of residual * q[channel], fp32; unspecified for tokens from limits[b] on.

    turned: given where residuals belong to keys before RoPE, which stand at those positions.
    """
    batch, heads, group, channels = q.shape
    tokens = index.shape[2]
    shape = jax.ShapeDtypeStruct((batch, heads, group, tokens), jnp.float32)
    step = min(TOKENS, tokens & -tokens)
    arrays = (index, residual, q.astype(jnp.float32), *(() if turned is None else (t[None] for t in turned)))
    zeros = jnp.zeros(shape.shape, shape.dtype)  # where a token has no slot of a head
    [scores] = triton_call(
        functools.partial(_scores_kernel, heads=heads, group=group, channels=channels, step=step),
        name="outlier_scores",
        grid=(batch, tokens // step),
        in_specs=[pl.BlockSpec((1,), lambda b, t: (b,)), *(whole_array_but(1, array, (0,)) for array in (*arrays, zeros))],
        out_specs=[whole_array_but(1, shape, (0,))],
        out_shape=[shape],
        launch=launch,
        num_warps=max(1, step // 32),
        num_stages=1,
        aliases={1 + len(arrays): 0},
    )(limits.astype(jnp.int32), *arrays, zeros)
    return scores


def outlier_values(
    weights: Float[Array, "B K G S"], index: UInt16[Array, "B E S"], residual: Array, limits: Int[Array, " B"], channels: int
) -> Float[Array, "B K G H"]:
    """Return the sum over the first limits[b] tokens and their slots of weight * residual, at the slot's channel; fp32.

    This is XLA's scatter, which on a GPU adds in any order.
    """
    batch, heads, group, _ = weights.shape
    index, rows = index.astype(jnp.int32), jnp.arange(batch)[:, None, None]
    token = jnp.arange(index.shape[2])[None, None]
    of_head = weights[rows, jnp.minimum(index // channels, heads - 1), :, token]  # [B, E, S, G]
    counts = token < limits[:, None, None]
    added = jnp.where(counts[..., None], of_head * as_float(residual, "float16").astype(jnp.float32)[..., None], 0)
    values = jnp.zeros((batch, heads * channels, group), jnp.float32).at[rows, index].add(added, mode="drop")
    return jnp.swapaxes(values.reshape(batch, heads, channels, group), 2, 3)


def _scores_kernel(
    limit_ref: Any, index_ref: Any, residual_ref: Any, q_ref: Any, *refs: Any, heads: int, group: int, channels: int, step: int
) -> None:
    # index, residual [E, S], q [K, G, H], the tables of a Turn or nothing, zeros, then the scores [K, G, S]
    *tables, _, out_ref = refs
    start, half = pl.program_id(1) * step, channels // 2
    tokens = start + lax.broadcasted_iota(jnp.int32, (step,), 0)
    slots = index_ref.shape[0] * (start < limit_ref[0]).astype(jnp.int32)  # none where no token counts

    def body(e: Array, carry: Any) -> Any:
        before, sums = carry
        index = index_ref[e, tokens].astype(jnp.int32)
        residual = as_float(residual_ref[e, tokens], "float16").astype(jnp.float32)
        real = index < heads * channels
        head, channel = jnp.where(real, index // channels, 0), index % channels
        cos, sin = residual, None
        if tables:
            pair = channel % half
            cos_a, sin_a = (table[tokens // SPAN, pair] for table in tables[:2])
            cos_b, sin_b = (table[tokens % SPAN, pair] for table in tables[2:])
            cos = residual * (cos_a * cos_b - sin_a * sin_b)
            sin = jnp.where(channel < half, residual, -residual) * (sin_a * cos_b + cos_a * sin_b)
        scores = []
        for g in range(group):
            new = cos * q_ref[head, g, channel]
            if sin is not None:
                new = new + sin * q_ref[head, g, (channel + half) % channels]
            scores.append(jnp.where(index // channels == before, sums[g], 0.0) + new)
            plt.store(out_ref.at[head, g, tokens], scores[g], mask=real)
        return index // channels, scores

    lax.fori_loop(0, slots, body, (jnp.full((step,), -1, jnp.int32), [jnp.zeros((step,), jnp.float32)] * group))
