"""Read outliers stored beside dense codes, in the slots of pools. A pool is a run of U tokens that
share slots, in all heads.

    scores    + sum over the slots of a head and token   residual * q[channel]
    values    + sum over tokens and their slots          p * residual at the channel

The slots of a pool are sorted by head, then token. Head k has slots ends[p, k - 1] to ends[p, k],
each with the place t * H + h of its token in the pool and its channel. Outliers are read apart from
the attention kernel. Scores come before it: a program takes a head of a pool, LANES slots at a
time, and adds each slot's share to its token by a one-hot sum, so that no atomics are needed and
results do not depend on the order of threads. Values come after it, from the scores that it stores
(decode_attention/outlier_values.py).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.launch import Launch
from pallas_kernels.readers.shared import as_float
from pallas_kernels.readers.turn import TurnTables
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import plt, triton_call, whole_array_but

LANES = 32  # slots that a program reads at once


def outlier_scores(
    q: Float[Array, "B k Q H"],
    index: UInt16[Array, "B n P"],
    residual: Array,
    ends: UInt16[Array, "B n K"],
    limits: Int[Array, " B"],
    turned: TurnTables | None,
    launch: Launch,
    pool: int,
    group: int,
    first: int = 0,
) -> Float[Array, "B k G S"]:
    """Return the sum over slots of residual * q[channel], fp32, for the n * pool tokens. Tokens
    from limits[b] on are unspecified.

    Args:
        q: queries.
        index: places of the slots in their pool.
        residual: [B, n, P], fp16, or uint16 that holds the bits.
        ends: for each head, the first slot behind its slots.
        limits: the number of tokens of each row.
        turned: the positions of keys, if residuals belong to keys before RoPE.
        launch: how the kernel is launched.
        pool: tokens of a pool, a power of two.
        group: G, the number of real query heads per KV head. The rest of q is padding.
        first: the KV head of the first queries.
    """
    batch, heads, _, channels = q.shape
    pools = index.shape[1]
    shape = jax.ShapeDtypeStruct((batch, heads, group, pools * pool), jnp.float32)
    tables = [] if turned is None else list(turned)
    [scores] = triton_call(
        functools.partial(_scores_kernel, group=group, channels=channels, pool=pool),
        name="outlier_scores",
        grid=(batch, heads, pools),
        in_specs=[
            pl.BlockSpec((1,), lambda b, k, p: (b,)),
            pl.BlockSpec((1,), lambda b, k, p: (0,)),
            *(whole_array_but(1, array, (0,)) for array in (ends, index, residual)),
            whole_array_but(2, q, (0, 1)),
            *(whole_array_but(0, table, ()) for table in tables),
        ],
        out_specs=[whole_array_but(2, shape, (0, 1))],
        out_shape=[shape],
        launch=launch,
        num_warps=max(1, pool // 32),
        num_stages=1,
    )(
        limits.astype(jnp.int32),
        jnp.full((1,), first, jnp.int32),
        ends,
        index,
        residual,
        q.astype(jnp.float32),
        *tables,
    )
    return scores


def _scores_kernel(
    limit_ref: Any,
    first_ref: Any,
    ends_ref: Any,
    index_ref: Any,
    residual_ref: Any,
    q_ref: Any,
    *refs: Any,
    group: int,
    channels: int,
    pool: int,
) -> None:
    # ends [n, K]; index, residual [n, P]; q [Q, H]; TurnTables or nothing; then the
    # scores [G, S]
    *tables, out_ref = refs
    head, number, half = first_ref[0] + pl.program_id(1), pl.program_id(2), channels // 2
    lanes, tokens = (lax.broadcasted_iota(jnp.int32, (size,), 0) for size in (LANES, pool))
    end = ends_ref[number, head].astype(jnp.int32)
    begin = jnp.where(head > 0, ends_ref[number, jnp.maximum(head - 1, 0)].astype(jnp.int32), 0)
    counted = number * pool < limit_ref[0]  # if no token counts, ends may be anything
    rounds = jnp.where(counted, (end - begin + LANES - 1) // LANES, 0)

    def body(i: Array, sums: Any) -> Any:
        slots = begin + i * LANES + lanes
        used = slots < end
        slots = jnp.where(used, slots, begin)
        place = index_ref[number, slots].astype(jnp.int32)
        residual = as_float(residual_ref[number, slots], "float16").astype(jnp.float32)
        token, channel = place // channels, place % channels
        here = used[:, None] & (token[:, None] == tokens[None])
        cos, sin = residual, None
        if tables:
            position, pair = number * pool + jnp.minimum(token, pool - 1), channel % half
            cos_a, sin_a = (table[position // SPAN, pair] for table in tables[:2])
            cos_b, sin_b = (table[position % SPAN, pair] for table in tables[2:])
            cos = residual * (cos_a * cos_b - sin_a * sin_b)
            sin = jnp.where(channel < half, residual, -residual) * (sin_a * cos_b + cos_a * sin_b)
        added = []
        for g in range(group):
            new = cos * q_ref[g, channel]
            if sin is not None:
                new = new + sin * q_ref[g, (channel + half) % channels]
            added.append(sums[g] + jnp.sum(jnp.where(here, new[:, None], 0.0), axis=0))
        return added

    sums = lax.fori_loop(0, rounds, body, [jnp.zeros((pool,), jnp.float32)] * group)
    for g in range(group):
        plt.store(out_ref.at[g, number * pool + tokens], sums[g])
