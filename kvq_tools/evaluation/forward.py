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
            filled = _repeated(inputs, lengths)
            keys, values, carry = kvq.cache.roundtrip_layer(
                fake, filled, layer_parameters, number, carry, layer.attention
            )
        attended = chunked_attention(
            inputs.q_rot, keys, values, layer.attention, layer.sink_logits()
        )
        hidden = finish_layer(layer, hidden, attended)
    return hidden


@jax.jit
def _repeated(inputs: LayerInputs, lengths: LengthsB) -> LayerInputs:
    """Return the inputs with each row's tokens repeated over its padding, so that padding widens no
    group's range beyond that of the row."""

    def fill(array: Array) -> Array:
        axis = max(1, array.ndim - 2)  # of [B, T], [B, T, D] and [B, heads, T, H]
        index = jnp.arange(array.shape[axis], dtype=jnp.int32)[None] % lengths[:, None]
        shape = [size if i in (0, axis) else 1 for i, size in enumerate(array.shape)]
        return jnp.take_along_axis(array, index.reshape(shape), axis=axis, mode="clip")

    filled = jax.tree.map(fill, dataclasses.replace(inputs, rope=None, sinks=None))
    return dataclasses.replace(filled, valid=inputs.valid, rope=inputs.rope, sinks=inputs.sinks)


@functools.partial(jax.jit, static_argnames="attention")
def chunked_attention(
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
    kv_heads, tokens = k.shape[1:3]
    size, before = min(length, QUERY_CHUNK), tokens - length
    chunks = -(-length // size)
    q_BKGTH = q.astype(k.dtype).reshape(batch, kv_heads, -1, length, head_dim)
    q_BKGTH = jnp.pad(q_BKGTH, ((0, 0), (0, 0), (0, 0), (0, chunks * size - length), (0, 0)))
    places = jnp.arange(tokens, dtype=jnp.int32)[None]

    # One KV head at a time: a product of two matrices takes XLA half as long on a CPU as a batch.
    def of_head(rows: tuple[Array, ...]) -> Float[Array, "C G t H"]:
        q_GTH, k_SH, v_SH, sinks_G = rows

        def of_chunk(i: Array) -> Float[Array, "G t H"]:
            some = lax.dynamic_slice_in_dim(q_GTH, i * size, size, axis=1)
            products = jnp.einsum("gth,sh->gts", some, k_SH, preferred_element_type=jnp.float32)
            scores = attention_logits(attention, products, head_dim)
            now = before + i * size + jnp.arange(size, dtype=jnp.int32)[:, None]
            seen = (places <= now) & inside_window(attention, now, places)
            scores = jnp.where(seen, scores, -jnp.inf)
            if sinks is not None:
                logits = jnp.broadcast_to(sinks_G[:, None, None], (*scores.shape[:-1], 1))
                scores = jnp.concatenate([scores, logits], axis=-1)
            weights = jax.nn.softmax(scores, axis=-1)[..., :tokens].astype(v.dtype)
            return jnp.einsum("gts,sh->gth", weights, v_SH)

        return lax.map(of_chunk, jnp.arange(chunks, dtype=jnp.int32))

    no_sinks = jnp.zeros((heads,)) if sinks is None else sinks
    sinks_KG = no_sinks.astype(jnp.float32).reshape(kv_heads, -1)
    sinks_BKG = jnp.broadcast_to(sinks_KG, (batch, *sinks_KG.shape))
    rows = (q_BKGTH, k, v, sinks_BKG)
    out = lax.map(of_head, jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), rows))
    out = jnp.moveaxis(out, 1, 2)  # [B K, G, chunks, size, H]
    return out.reshape(batch, heads, chunks * size, head_dim)[:, :, :length]
