"""The accumulator of cross-layer methods, to which each layer adds its dequantized differences.

    acc_base = dequantized rows of the base layer
    acc_i    = accumulated_i(acc_{i-1}, dequantized differences of layer i)

It is working memory of one forward pass, [B, S, D] over the body's tokens. It is updated in place
from layer to layer and never stored in the cache. The functions here are the identity for plans of
other methods, whose carry is `()`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.stored import load_chunk
from kvq_jax.codecs.codec import Codec
from kvq_jax.codecs.facts import CrossLayer
from kvq_jax.layer.plan import LayerPlan, LayerState, by_side
from kvq_jax.types.array_types import CachedRows, LengthsB, Tree

CHUNK_ELEMENTS = 1 << 20  # elements of the accumulator that one step reads and writes


def advance(plan: LayerPlan, params: Tree, state: LayerState, live: LengthsB, carry: Tree) -> Tree:
    """Return the carry after this layer.

    live [B]: body tokens of each row. Entries beyond these are unspecified, but finite if the body
    is.
    """
    codec, cross = plan.k, plan.cross_layer
    if cross is None:
        return carry
    size, batch = plan.regions.held_capacity, live.shape[0]
    spec = cross.accumulator(batch, size)
    tokens, wide = spec.axis("tokens"), spec["model"].size
    stored = jnp.zeros(spec.shape, spec.struct.dtype) if cross.starts else incoming(carry)
    if not size:
        return stored
    block = plan.regions.block
    chunk = min(max(CHUNK_ELEMENTS // (batch * wide * block), 1) * block, size)
    key_params, stats = by_side(params)[0], state.stats[0]

    def step(i: Array, stored: Array) -> Array:
        at = jnp.minimum(i * chunk, size - chunk)
        # the last chunk starts early, and adds nothing twice
        fresh = at + jnp.arange(chunk, dtype=jnp.int32) >= i * chunk
        old = lax.dynamic_slice_in_dim(stored, at, chunk, tokens)
        body = load_chunk(codec.body(1, 1, block), state.body[0], at // block, chunk // block)
        differences = codec.dequantize(key_params, stats, body)
        new = after(cross, key_params, differences, spec.load(old)[:, None])
        updated = jnp.where(spec.along("tokens", fresh), spec.store(new[:, 0]), old)
        return lax.dynamic_update_slice_in_dim(stored, updated, at, tokens)

    return lax.fori_loop(0, -(-jnp.max(plan.regions.held(live)) // chunk), step, stored)


def incoming(carry: Tree) -> Array:
    """Return the accumulator from the layer below. Raise ValueError if there is none."""
    if not jax.tree.leaves(carry):
        raise ValueError(
            "this layer builds on the one below it, but no accumulator was carried to it: run the"
            " layers in order"
        )
    return carry


def tokens_of(
    plan: LayerPlan, carry: Tree, index: Int[Array, "B E"]
) -> Float[Array, "B 1 E D"] | None:
    """Return this shard's accumulator at the entries index[b], or None for plans that build on
    no layer below."""
    cross = plan.cross_layer
    if cross is None or cross.starts:
        return None
    spec = cross.accumulator(1, 1)
    entries = jnp.take_along_axis(
        incoming(carry), index[..., None], axis=spec.axis("tokens"), mode="clip"
    )
    return spec.load(entries)[:, None]


def coded(
    codec: Codec, params: Tree, rows: CachedRows, below: Float[Array, "B 1 T D"] | None
) -> CachedRows:
    """Return the vectors to quantize in place of the rows: their difference from the prediction of
    the layers below, if there are any."""
    cross = codec.facts.cross_layer
    if below is None or cross is None or cross.starts:
        return rows
    return rows.astype(jnp.float32) - cross.expected(params, below[:, 0])


def decoded(
    codec: Codec, params: Tree, differences: CachedRows, below: Float[Array, "B 1 T D"] | None
) -> CachedRows:
    """Return the rows that dequantized differences stand for: the inverse of `coded`."""
    cross = codec.facts.cross_layer
    if below is None or cross is None or cross.starts:
        return differences
    return differences + cross.expected(params, below[:, 0])


def after(
    cross: CrossLayer, params: Tree, differences: CachedRows, below: Float[Array, "B 1 T D"] | None
) -> Float[Array, "B 1 T D"]:
    """Return the accumulator of some tokens after this layer, in its stored dtype."""
    if cross.starts or below is None:
        accumulator = jnp.zeros((), jnp.float32)
    else:
        accumulator = below[:, 0].astype(jnp.float32)
    new = cross.accumulated(params, accumulator, differences)
    return new.astype(cross.accumulator(1, 1).dtype)[:, None]
