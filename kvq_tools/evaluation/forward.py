"""The model over whole windows, without a cache: the full-precision reference, and the simulation
that papers use.

    exact   attention reads K and V
    fake    attention reads K^ and V^ = roundtrip_layer(spec, K, V): every token quantized, no
            full-precision window

Neither uses a cache's windows, ageing or attention: a bug in these cannot hide in the reference.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from kvq_jax.attention.logits import attention_logits, inside_window
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.types.array_types import LayerInputs, LengthsB, QueryBNTH
from kvq_models.inference.layers import attention_inputs, embed, finish_layer
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_models.llama.rope import ropes_for

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
    rope = ropes_for(llama.config, length)
    parameters = ((),) * len(llama.layers) if fake is None else parameters_for(llama, fake)
    hidden, carry = embed(llama, tokens), ()
    for number, (layer, layer_parameters) in enumerate(zip(llama.layers, parameters, strict=True)):
        inputs = attention_inputs(layer, hidden, positions, valid, rope)
        keys, values = inputs.k_rot, inputs.v
        if fake is not None:
            filled = _last_repeated(inputs, lengths)
            keys, values, carry = kvq.cache.roundtrip_layer(
                fake, filled, layer_parameters, number, carry, layer.attention
            )
        attended = causal_attention(
            inputs.q_rot, keys, values, layer.attention, layer.sink_logits()
        )
        hidden = finish_layer(layer, hidden, attended)
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

    filled = jax.tree.map(fill, dataclasses.replace(inputs, rope=None, sinks=None))
    return dataclasses.replace(filled, valid=inputs.valid, rope=inputs.rope, sinks=inputs.sinks)


@functools.partial(jax.jit, static_argnames="attention")
def causal_attention(
    q: QueryBNTH,
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    attention: Attention = PLAIN,
    sinks: Float[Array, " N"] | None = None,
) -> QueryBNTH:
    """Return softmax(q k^T / sqrt(H)) v over the tokens up to and including the query's that
    `attention` lets it see, with an fp32 softmax, QUERY_CHUNK queries at a time.

    Queries are those of the last tokens, if there are fewer than keys. Query head n reads KV head
    n // G. The result has the dtype of v.
    """
    batch, heads, length, head_dim = q.shape
    size, before = min(length, QUERY_CHUNK), k.shape[2] - length
    chunks = -(-length // size)
    q_BKGTH = q.astype(k.dtype).reshape(batch, k.shape[1], -1, length, head_dim)
    q_BKGTH = jnp.pad(q_BKGTH, ((0, 0), (0, 0), (0, 0), (0, chunks * size - length), (0, 0)))
    tokens = jnp.arange(k.shape[2], dtype=jnp.int32)[None]

    def one(i: Array) -> Array:
        at = i * size
        some = lax.dynamic_slice_in_dim(q_BKGTH, at, size, axis=3)
        products = jnp.einsum("bkgth,bksh->bkgts", some, k, preferred_element_type=jnp.float32)
        scores = attention_logits(attention, products, head_dim)
        now = before + at + jnp.arange(size, dtype=jnp.int32)[:, None]
        seen = (tokens <= now) & inside_window(attention, now, tokens)
        scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
        if sinks is not None:
            logits = sinks.astype(jnp.float32).reshape(k.shape[1], -1, 1, 1)
            logits = jnp.broadcast_to(logits, (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, logits], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : tokens.size].astype(v.dtype)
        return jnp.einsum("bkgts,bksh->bkgth", weights, v)

    out = jnp.moveaxis(
        lax.map(one, jnp.arange(chunks, dtype=jnp.int32)), 0, 3
    )  # [B, K, G, chunks, size, H]
    return out.reshape(batch, heads, chunks * size, head_dim)[:, :, :length]
