"""The model over whole windows, without a cache: the full-precision reference, and the simulation
that papers use.

    exact   attention reads K and V
    fake    attention reads K^ and V^ = roundtrip_layer(spec, K, V): every token quantized, no
            full-precision window

Neither uses a cache's windows, ageing or attention: a bug in these cannot hide in the reference.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.types.array_types import LayerInputs, LengthsB, QueryBNTH, RowsBKTH
from kvq_models.inference import layer_by_layer
from kvq_models.inference.layers import attention_inputs, finish_layer
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_models.llama.rope import rope_for

QUERY_CHUNK = 256  # queries whose scores exist at a time


def hidden_states(
    llama: Llama, tokens: Int[Array, "B T"], lengths: LengthsB, fake: CacheSpec | None = None
) -> HiddenBTD:
    """Return the last layer's output for right-padded tokens: exact, or with every key and value as
    the body of a `fake` cache returns it.

    Entries at padding are finite and unspecified. Padding enters no group and no statistic.
    """
    batch, length = tokens.shape
    index = jnp.arange(length, dtype=jnp.int32)
    positions = jnp.broadcast_to(index[None], (batch, length))
    valid = index[None] < lengths[:, None]
    rope = rope_for(llama.config, length)
    parameters = ((),) * len(llama.layers) if fake is None else parameters_for(llama, fake)
    hidden, carry = layer_by_layer.embed(llama, tokens), ()
    for number, (layer, layer_parameters) in enumerate(zip(llama.layers, parameters, strict=True)):
        inputs = attention_inputs(layer, hidden, positions, valid, rope)
        keys, values = inputs.k_rot, inputs.v
        if fake is not None:
            keys, values, carry = kvq.cache.roundtrip_layer(
                fake, _last_repeated(inputs, lengths), layer_parameters, number, carry
            )
        hidden = finish_layer(layer, hidden, causal_attention(inputs.q_rot, keys, values))
    return hidden


@jax.jit
def _last_repeated(inputs: LayerInputs, lengths: LengthsB) -> LayerInputs:
    """Return the inputs with each row's last token repeated over its padding, so that padding
    widens no group's range."""

    def fill(array: Array) -> Array:
        axis = max(1, array.ndim - 2)  # of [B, T], [B, T, D] and [B, heads, T, H]
        index = jnp.minimum(
            jnp.arange(array.shape[axis], dtype=jnp.int32)[None], lengths[:, None] - 1
        )
        shape = [size if i in (0, axis) else 1 for i, size in enumerate(array.shape)]
        return jnp.take_along_axis(array, index.reshape(shape), axis=axis, mode="clip")

    filled = jax.tree.map(fill, dataclasses.replace(inputs, rope=None))
    return dataclasses.replace(filled, valid=inputs.valid, rope=inputs.rope)


@jax.jit
def causal_attention(q: QueryBNTH, k: RowsBKTH, v: RowsBKTH) -> QueryBNTH:
    """Return softmax(q k^T / sqrt(H)) v over tokens up to and including the query's, with an fp32
    softmax, QUERY_CHUNK queries at a time.

    Query head n reads KV head n // G. The result has the dtype of v.
    """
    batch, heads, length, head_dim = q.shape
    size = min(length, QUERY_CHUNK)
    chunks = -(-length // size)
    q_BKGTH = q.astype(k.dtype).reshape(batch, k.shape[1], -1, length, head_dim)
    q_BKGTH = jnp.pad(q_BKGTH, ((0, 0), (0, 0), (0, 0), (0, chunks * size - length), (0, 0)))

    def one(i: Array) -> Array:
        at = i * size
        some = lax.dynamic_slice_in_dim(q_BKGTH, at, size, axis=3)
        scores = (
            jnp.einsum("bkgth,bksh->bkgts", some, k, preferred_element_type=jnp.float32)
            * head_dim**-0.5
        )
        seen = (
            jnp.arange(length, dtype=jnp.int32)[None]
            <= at + jnp.arange(size, dtype=jnp.int32)[:, None]
        )
        weights = jax.nn.softmax(
            jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1
        ).astype(v.dtype)
        return jnp.einsum("bkgts,bksh->bkgth", weights, v)

    out = jnp.moveaxis(
        lax.map(one, jnp.arange(chunks, dtype=jnp.int32)), 0, 3
    )  # [B, K, G, chunks, size, H]
    return out.reshape(batch, heads, chunks * size, head_dim)[:, :, :length]
