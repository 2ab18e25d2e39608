"""The reference that defines correct attention: dequantize the whole layer, then compute ordinary
softmax attention in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvq_jax.arrays.stored import load_body
from kvq_jax.attention.logits import attention_logits
from kvq_jax.layer import cross_layer
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.layer.plan import LayerPlan, LayerState, by_side
from kvq_jax.types.array_types import CachedRows, LengthsB, QueryBNTH, RowsBKTH, Tree
from kvq_jax.types.rope import Rope


def decode_rows(
    plan: LayerPlan, params: Tree, state: LayerState, lengths: LengthsB, carry: Tree = ()
) -> tuple[CachedRows, ...]:
    """Return the dequantized rows of each codec of the plan in token order, fp32 [B, K, S, C],
    zeros from `lengths` on and for tokens that the body no longer holds.

    carry: the carry of the layer below.
    """
    regions = plan.regions
    position = jnp.broadcast_to(
        jnp.arange(regions.capacity, dtype=jnp.int32), (lengths.shape[0], regions.capacity)
    )
    body = regions.aged_tokens(lengths)[:, None]
    aged = regions.sink + body
    token = position - regions.sink
    index = jnp.where(
        position < regions.sink,
        position,
        jnp.where(
            position < aged,
            regions.sink_slots
            + regions.place(token // regions.block) * regions.block
            + token % regions.block,
            regions.sink_slots + regions.held_capacity + regions.ring_slot(position),
        ),
    )
    live = (position < regions.sink) | (token >= regions.oldest(body))
    live = (live & (position < lengths[:, None]))[:, None, :, None]
    by_codec = []
    for side, codec in enumerate(plan.codecs):
        stored = load_body(codec.body(1, 1, regions.block), state.body[side])
        side_params = by_side(params)[side]
        below = cross_layer.tokens_of(plan, carry, position[:, : regions.body_capacity])
        differences = codec.dequantize(side_params, state.stats[side], stored)
        decoded = cross_layer.decoded(codec, side_params, differences, below)
        parts = (state.sink[side], decoded, state.ring[side])
        rows = jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=2)
        in_order = jnp.take_along_axis(rows, index[:, None, :, None], axis=2, mode="clip")
        by_codec.append(jnp.where(live, in_order, 0))
    return tuple(by_codec)


def decode_vectors(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    lengths: LengthsB,
    rope: Rope | None,
    carry: Tree = (),
) -> tuple[RowsBKTH, RowsBKTH]:
    """Return keys after RoPE and values of every cached token, fp32 [B, K, S, H]."""
    rows = decode_rows(plan, params, state, lengths, carry)
    positions = jnp.broadcast_to(
        jnp.arange(plan.regions.capacity, dtype=jnp.int32),
        (lengths.shape[0], plan.regions.capacity),
    )
    params = by_side(params)
    return plan.k.vectors(params[0], rows[0], positions, rope), plan.v.vectors(
        params[1], rows[-1], positions, rope
    )


def attend(
    q: QueryBNTH,
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    attention: Attention = PLAIN,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T H"]:
    """Return the attention over the tokens that `mask` marks, in fp32. Query head n reads KV head
    n // G."""
    batch, heads, tokens, head_dim = q.shape
    q_BKGTH = q.astype(jnp.float32).reshape(batch, k.shape[1], -1, tokens, head_dim)
    products = jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k.astype(jnp.float32))
    logits = jnp.where(
        mask[:, None, None], attention_logits(attention, products, head_dim), -jnp.inf
    )
    if sinks is not None:  # one more token, whose value is zero
        column = sinks.astype(jnp.float32).reshape(1, k.shape[1], -1, 1, 1)
        column = jnp.broadcast_to(column, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[2]]
    return jnp.einsum("bkgts,bksh->bkgth", weights, v.astype(jnp.float32)).reshape(q.shape)
