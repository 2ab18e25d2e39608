"""Read a body for many queries: dequantize one chunk after the other, once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from kvq_jax.arrays.stored import load_chunk
from kvq_jax.attention import online_softmax, streaming
from kvq_jax.attention.logits import first_inside
from kvq_jax.types.array_types import PositionsBT, RowsBKTH
from pallas_kernels.decode_attention.partial_attention import PartialAttention

# (keys, values, their positions [B, C], mask of the tokens that were read [B, C]) -> attention
AttendChunk: TypeAlias = Callable[
    [RowsBKTH, RowsBKTH, Int[Array, "B C"], Bool[Array, "B C"]], PartialAttention
]


def add_body(
    view: streaming.View,
    positions: PositionsBT,
    limits: PositionsBT,
    chunk: int,
    attend: AttendChunk,
    part: PartialAttention,
) -> PartialAttention:
    """Return `part` with the body added, `chunk` tokens at a time. Chunks before the windows of all
    queries are skipped.

    Args:
        view: what the queries may read.
        positions: of the queries.
        limits: [B, T], constant along T.
        chunk: tokens, whole blocks and at most the body.
        attend: the attention of all queries over one chunk.
        part: their attention so far.
    """
    plan, regions = view.plan, view.plan.regions
    size = regions.read_capacity

    def step(i: Array, part: PartialAttention) -> PartialAttention:
        at, fresh = streaming.chunk_at(i, chunk, size)
        index = regions.tokens_at(at + jnp.arange(chunk, dtype=jnp.int32), view.written)
        tokens = regions.sink + jnp.maximum(index, 0)
        tokens = jnp.broadcast_to(tokens, (len(limits), chunk))

        def vectors(side: int) -> RowsBKTH:
            home = 0 if plan.joint else side
            codec, params = (plan.k, plan.v)[side], view.params[side]
            specs = plan.readable_specs(home, 1, 1, regions.block)
            stored = load_chunk(specs, view.body[home], at // regions.block, chunk // regions.block)
            cached = codec.dequantize(params, view.stats[home], stored)
            return codec.vectors(params, cached, tokens, view.rope)

        seen = (index >= 0) & (index < limits[:, :1]) & fresh[None]
        return online_softmax.merge(part, attend(vectors(0), vectors(1), tokens, seen))

    begin, end = jnp.int32(0), jnp.max(regions.held(limits))
    lower = first_inside(plan.attention, regions.sink, positions[:, 0])
    if regions.wraps:
        end = jnp.minimum(end, size)
    elif lower is not None:
        begin = jnp.min(regions.held_before(lower)) // chunk
    return lax.fori_loop(begin, -(-end // chunk), step, part)
