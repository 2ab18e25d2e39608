"""A vocabulary of tokens whose queries, keys and values depend on the token and the layer alone."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.types.rope import rotate
from tests.kvq_jax import layer_runs
from tests.kvq_jax.cache_runs import DIMS
from tests.kvq_jax.layer_runs import Sequences, quick_jit

WORDS = 311  # tokens of the vocabulary


@functools.cache
def vocabulary(layer: int) -> Sequences:
    """Return queries, keys before RoPE and values of every token in a layer, as one sequence."""
    rng = np.random.default_rng(50 + layer)
    q = rng.normal(size=(1, DIMS.num_attention_heads, WORDS, DIMS.head_dim)).astype(np.float32)
    k, v = (
        rng.normal(size=(1, DIMS.num_key_value_heads, WORDS, DIMS.head_dim)).astype(np.float32)
        for _ in range(2)
    )
    k[..., :: DIMS.head_dim // 4] *= 3
    return Sequences(q, k, k, v, layer_runs.sequences().rope)


@functools.cache
def inputs_of_words(layer: int) -> np.ndarray:
    return vocabulary(layer).x[0]


_rotate = quick_jit(rotate)


def layer_inputs(
    layer: int, ids: np.ndarray, start: np.ndarray, counts: np.ndarray
) -> kvq.types.LayerInputs:
    """Return the inputs of tokens ids [B, T] at positions start[b] + t, of which counts[b] are
    real. Padding is NaN."""
    words = vocabulary(layer)
    valid = np.arange(ids.shape[1]) < counts[:, None]
    positions = jnp.asarray(start[:, None] + np.arange(ids.shape[1]), jnp.int32)
    real = valid[:, None, :, None]
    q, k, v = (
        np.where(real, np.moveaxis(rows[0][:, ids], 0, 1), np.float32(np.nan))
        for rows in (words.q, words.k_pre, words.v)
    )
    x = np.where(valid[..., None], inputs_of_words(layer)[ids], np.float32(np.nan))
    q_rot, k_rot = (_rotate(jnp.asarray(rows), positions, words.rope) for rows in (q, k))
    return kvq.types.LayerInputs(
        jnp.asarray(x),
        jnp.asarray(q),
        q_rot,
        jnp.asarray(k),
        k_rot,
        jnp.asarray(v),
        positions,
        jnp.asarray(valid),
        words.rope,
    )
