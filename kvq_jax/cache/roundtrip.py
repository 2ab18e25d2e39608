"""The round trip of given keys and values through a cache: every token is quantized and
dequantized, and there are no windows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Origin
from kvq_jax.layer import cross_layer
from kvq_jax.layer.plan import LayerPlan, by_side
from kvq_jax.types.array_types import LayerInputs, QueryBNTH, RowsBKTH, Tree


def roundtrip_layer(
    spec: CacheSpec | str, inputs: LayerInputs, params: Tree = (), layer: int = 0, carry: Tree = ()
) -> tuple[RowsBKTH, RowsBKTH, Tree]:
    """Return (k_hat, v_hat, carry): keys after RoPE and values, fp32 [B, K, T, H], as the body
    would return them for tokens of one prompt.

    The last token is repeated to fill the last block, which widens no range. Give each layer the
    carry of the layer below it, and the first layer `()`.
    """
    spec = parse(spec)
    batch, heads, tokens, head_dim = inputs.v.shape
    width = head_dim * heads if inputs.x is None else inputs.x.shape[-1]
    dims = CacheDims(layer + 1, inputs.q_rot.shape[1], heads, head_dim, width)
    return _roundtrip(spec.layer(layer, dims, tokens, "float32"), inputs, params, carry)


@functools.partial(jax.jit, static_argnums=0)  # equal layers are traced and compiled once
def _roundtrip(
    plan: LayerPlan, inputs: LayerInputs, params: Tree, carry: Tree
) -> tuple[RowsBKTH, RowsBKTH, Tree]:
    batch, _, tokens, _ = inputs.v.shape
    padding, own = -tokens % plan.regions.block, by_side(params)
    index = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    below, by_codec = cross_layer.tokens_of(plan, carry, index), []
    for codec, mine in zip(plan.codecs, own, strict=False):
        rows = cross_layer.coded(codec, mine, codec.rows(mine, inputs).astype(jnp.float32), below)
        stats = codec.statistics.of(mine, inputs)
        padded = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)), mode="edge")
        at = jnp.pad(inputs.positions, ((0, 0), (0, padding)), mode="edge")
        body = codec.quantize(mine, stats, padded, Origin(at, prefill=True))
        decoded = codec.dequantize(mine, stats, body)[:, :, :tokens]
        by_codec.append(cross_layer.decoded(codec, mine, decoded, below))
        if plan.cross_layer:
            held = cross_layer.after(plan.cross_layer, mine, decoded, below)
            carry = plan.cross_layer.accumulator(batch, tokens).store(held[:, 0])
    k = plan.k.vectors(own[0], by_codec[0], inputs.positions, inputs.rope)
    v = plan.v.vectors(own[1], by_codec[-1], inputs.positions, inputs.rope)
    return k.astype(jnp.float32), v.astype(jnp.float32), carry


def roundtrip(
    spec: CacheSpec | str, k: RowsBKTH, v: RowsBKTH, q: QueryBNTH | None = None
) -> tuple[RowsBKTH, RowsBKTH]:
    """Return (k_hat, v_hat), fp32, of keys after RoPE and values [B, K, T, H]; q [B, N, T, H] is
    for methods that read queries.

    Serves methods without parameters that cache keys after RoPE; others need `roundtrip_layer`.
    Raises ValueError where a method reads queries and q is None.
    """
    spec = parse(spec)
    if q is None and (spec.k.reads_queries or spec.v.reads_queries):
        raise ValueError(f"{str(spec)!r} reads queries: give roundtrip q [B, N, T, H]")
    batch, _, tokens, _ = k.shape
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    inputs = LayerInputs(
        None,
        None,
        k if q is None else q,
        None,
        k,
        v,
        positions,
        jnp.ones((batch, tokens), bool),
        None,
    )
    return roundtrip_layer(spec, inputs)[:2]
