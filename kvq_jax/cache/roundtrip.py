"""Send keys and values through a cache and back: every token is quantized and dequantized, and
there are no windows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.call_layout import Layout, check_floats, tokens_of
from kvq_jax.cache.method_text import MAX_LAYERS
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import MissingInputError, TokensAt
from kvq_jax.layer import cross_layer
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.layer.plan import LayerPlan, by_side
from kvq_jax.methods.base import PerLayer
from kvq_jax.placement.crossing import explicit_axes
from kvq_jax.types.array_types import LayerInputs, RowsBKTH, Tree
from kvq_jax.types.integers import integer


def roundtrip_layer(
    spec: CacheSpec | str,
    inputs: LayerInputs,
    params: Tree = (),
    layer: int = 0,
    carry: Tree = (),
    attention: Attention = PLAIN,
) -> tuple[RowsBKTH, RowsBKTH, Tree]:
    """Return the keys and values that the body of a cache would return for the tokens of a prompt.

    A last block that the prompt does not fill is filled with the prompt's first tokens: copies of
    one token would be nearly exact under scales by channel. A prompt of a few tokens is filled with
    copies all the same: give at least a block of tokens to see a method's usual error.

    Args:
        spec: the cache, or its text.
        inputs: the tokens of the prompt as the layer sees them.
        params: the layer's parameters from `kvq.parameters.prepare`, for methods that need any.
        layer: the number of the layer.
        carry: the carry that this function returned for the layer below, `()` for the first layer.
        attention: the layer's attention, for methods that follow it.

    Returns:
        (k_hat, v_hat, carry): keys after RoPE and values, fp32 [B, K, T, H], and the carry for the
        layer above.

    Raises:
        ValueError: if the spec cannot be read, its options do not fit the model, or a spec can
            name no such layer.
    """
    spec, number = parse(spec), integer(layer, 0)
    if number is None or number >= MAX_LAYERS:
        raise ValueError(f"{layer=} must be an integer from 0 to {MAX_LAYERS - 1}")
    batch, heads, tokens, head_dim = inputs.v.shape
    width = head_dim * heads if inputs.x is None else inputs.x.shape[-1]
    layers = (attention,) * (number + 1)
    dims = CacheDims(number + 1, inputs.q_rot.shape[1], heads, head_dim, width, layers)
    run = functools.partial(_roundtrip, spec.layer(number, dims, tokens, "float32"))
    arrays = inputs, params, carry
    if not any(map(explicit_axes, jax.tree.leaves(arrays))):
        return run(*arrays)
    rows = jax.typeof(inputs.v).sharding
    with jax.sharding.use_abstract_mesh(rows.mesh):
        outs = rows.spec, rows.spec, PartitionSpec()
        split: Any = jax.sharding.auto_axes(run, out_sharding=outs)
        return split(*arrays)


@functools.partial(jax.jit, static_argnums=0)  # equal layers are traced and compiled once
def _roundtrip(
    plan: LayerPlan, inputs: LayerInputs, params: Tree, carry: Tree
) -> tuple[RowsBKTH, RowsBKTH, Tree]:
    batch, _, tokens, _ = inputs.v.shape
    padding, params = -tokens % plan.regions.block, by_side(params)
    index = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    below, by_codec = cross_layer.tokens_of(plan, carry, index), []
    for codec, side_params in zip(plan.codecs, params, strict=False):
        rows = codec.rows(side_params, inputs).astype(jnp.float32)
        rows = cross_layer.coded(codec, side_params, rows, below)
        stats = codec.statistics.of(side_params, inputs)
        padded = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)), mode="wrap")
        at = jnp.pad(inputs.positions, ((0, 0), (0, padding)), mode="wrap")
        body = codec.quantize(side_params, stats, padded, TokensAt(at, prefill=True))
        decoded = codec.dequantize(side_params, stats, body)[:, :, :tokens]
        by_codec.append(cross_layer.decoded(codec, side_params, decoded, below))
        if plan.cross_layer:
            accumulator = cross_layer.after(plan.cross_layer, side_params, decoded, below)
            carry = plan.cross_layer.accumulator(batch, tokens).store(accumulator[:, 0])
    k = plan.k.vectors(params[0], by_codec[0], inputs.positions, inputs.rope)
    v = plan.v.vectors(params[1], by_codec[-1], inputs.positions, inputs.rope)
    return k.astype(jnp.float32), v.astype(jnp.float32), carry


def roundtrip(
    spec: CacheSpec | str,
    k: Float[Array, "B _ _ H"],
    v: Float[Array, "B _ _ H"],
    q: Float[Array, "B _ _ H"] | None = None,
    *,
    layout: Layout,
    layer: int | None = None,
) -> tuple[Float[Array, "B _ _ H"], Float[Array, "B _ _ H"]]:
    """Return keys and values as the body of a cache would return them for the tokens of a prompt.

    For methods without parameters that cache keys after RoPE. Others need
    `kvq.cache.roundtrip_layer`. Not for training: rounding passes no gradients on, and only the
    largest and smallest entries of a group get any, through its scale.

    Args:
        spec: the cache, or its text.
        k: keys after RoPE, [B, T, K, H] or [B, K, T, H], as `layout` says.
        v: values, as k.
        q: queries after RoPE, [B, T, N, H] or [B, N, T, H], for methods that read them.
        layout: "BTNH" or "BNTH", the order of the axes of arguments and results. It has no default,
            because one that is not the caller's would mix up heads and tokens in silence.
        layer: the number of the layer, for specs that name layers, such as with skip_layers.

    Returns:
        (k_hat, v_hat), in the shape of k and the dtypes of k and v.

    Raises:
        ValueError: if the method needs more than that, or reads queries and q is None, shapes do
            not fit each other, the layout is unknown, or the spec treats layers differently and
            `layer` is None.
    """
    tokens_of("k", k, layout)
    _check_like_k(k, v, q, layout)
    spec = parse(spec)
    if layer is not None and integer(layer, 0) is None:
        raise ValueError(f"{layer=} must be an integer of at least 0")
    if layer is None and _names_layers(spec):
        raise ValueError(f"{str(spec)!r} names layers: give roundtrip the number of one, layer=")
    if layout == "BTNH":
        q = None if q is None else jnp.swapaxes(q, 1, 2)
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        k, v = roundtrip(spec, k, v, q, layout="BNTH", layer=layer)
        return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    if q is None and spec.reads_queries:
        raise ValueError(f"{str(spec)!r} reads queries: give roundtrip q [B, N, T, H]")
    k, v = jnp.asarray(k), jnp.asarray(v)
    batch, _, tokens, _ = k.shape
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    valid, queries = jnp.ones((batch, tokens), bool), k if q is None else q
    inputs = LayerInputs(
        x=None,
        q_pre=None,
        q_rot=queries,
        k_pre=None,
        k_rot=k,
        v=v,
        positions=positions,
        valid=valid,
        rope=None,
    )
    try:
        k_hat, v_hat, _ = roundtrip_layer(spec, inputs, layer=layer or 0)
    except MissingInputError as error:
        raise ValueError(
            f"{error}; kvq.cache.roundtrip_layer takes it, and the layer's parameters"
        ) from error
    return k_hat.astype(k.dtype), v_hat.astype(v.dtype)


def _names_layers(spec: CacheSpec) -> bool:
    """Return True if a spec skips layers or has an option that differs by layer."""
    values = (getattr(method, f.name) for method in (spec.k, spec.v) for f in method.options())
    return bool(spec.skip_layers) or any(isinstance(value, PerLayer) for value in values)


def _check_like_k(k: Array, v: Array, q: Array | None, layout: Layout) -> None:
    """Raise ValueError unless v has the shape of k, and q too or with a multiple of its heads, and
    all hold floats."""
    for name, array in (("k", k), ("v", v), ("q", q)):
        if array is not None:
            check_floats(name, jnp.asarray(array))
    shape, heads = list(k.shape), layout.index("N")
    if (given := list(np.shape(v))) != shape:
        raise ValueError(f"v must have shape {shape}, as k has, got {given}")
    if q is None:
        return
    given = list(np.shape(q))
    alike = len(given) == 4 and given[heads] % shape[heads] == 0
    if not alike or given[:heads] + given[heads + 1 :] != shape[:heads] + shape[heads + 1 :]:
        raise ValueError(
            f"q must have shape {shape}, as k has, or a multiple of its heads, got {given}"
        )
