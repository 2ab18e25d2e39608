"""The saliency of tokens: the attention that they get from a few queries of the prompt, the probes.

    saliency_i = sum over probes p >= i of softmax(q_p . K / sqrt(H))_i / number of probes p >= i

averaged over the query heads. The softmax is the layer's own, with its scale, soft cap and sinks,
and a probe whose window has left token i behind does not count. Half of the probes are the prompt's
last tokens, half are spread over it. They are kept, each with the log of its softmax's denominator
over the prompt, so that a key's saliency can be computed when its block is quantized. A key behind
all probes is met by all of them, as if it had been in the prompt.
Source: He et al., ZipCache, section 4.2 and 4.3.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.attention.logits import attention_logits, inside_window
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.types.array_types import LayerInputs, LengthsB

KEY_CHUNK = 1024  # keys of a prompt that all probes meet at a time
GOLDEN_RATIO = 0.6180339887498949
MAX_LOG = 30.0  # of a key behind the probes, whose denominator does not count it
DTYPE = "float16"  # of stored queries

Probes = dict[str, Array]  # queries [B, N, P, H], normalizers [B, N, P], positions [B, P]


def probe_positions(lengths: LengthsB, count: int) -> Int[Array, "B P"]:
    """Return the positions of the probes in prompts of these lengths.

    They are the last positions, and one in each of as many equal parts of the prompt. A prompt that
    is too short has some of them twice.
    """
    recent = count - count // 2
    last = lengths[:, None] - 1 - jnp.arange(recent, dtype=jnp.int32)[None]
    parts = np.arange(count // 2)
    spread = (parts + parts * GOLDEN_RATIO % 1) / max(1, count // 2)
    anywhere = jnp.floor(
        lengths[:, None].astype(jnp.float32) * jnp.asarray(spread, jnp.float32)[None]
    ).astype(lengths.dtype)
    return jnp.maximum(jnp.concatenate([last, anywhere], axis=1), 0)


def probes_of(inputs: LayerInputs, count: int, attention: Attention = PLAIN) -> Probes:
    """Return the probes of each prompt, from all its valid tokens."""
    heads, (batch, query_heads, tokens, _) = inputs.k_rot.shape[1], inputs.q_rot.shape
    positions = probe_positions(jnp.sum(inputs.valid, axis=1, dtype=jnp.int32), count)
    queries = jnp.take_along_axis(
        inputs.q_rot, positions[:, None, :, None], axis=2, mode="clip"
    ).astype(jnp.float32)
    limit = float(jnp.finfo(DTYPE).max)
    queries = jnp.clip(jnp.where(jnp.isnan(queries), 0, queries), -limit, limit).astype(
        jnp.dtype(DTYPE)
    )
    rows = _by_kv_head(queries, heads)
    chunk = min(tokens, KEY_CHUNK)

    def add(i: Array, total: Array) -> Array:
        # The last chunk starts early and leaves out the keys that were counted before.
        i = jnp.asarray(i, jnp.int32)  # int64 if jax_enable_x64 is set, an int under disable_jit
        at = jnp.minimum(i * chunk, tokens - chunk)
        keys = lax.dynamic_slice_in_dim(inputs.k_rot, at, chunk, 2).astype(jnp.float32)
        index = at + jnp.arange(chunk, dtype=jnp.int32)
        real = lax.dynamic_slice_in_dim(inputs.valid, at, chunk, 1) & (index >= i * chunk)[None]
        finite = jnp.where(real[:, None, :, None] & jnp.isfinite(keys), keys, 0)
        sees = _sees(attention, positions[..., None], index[None, None])  # [B, P, chunk]
        seen = real[:, None] & sees
        logits = jnp.where(seen[:, None, None], _logits(attention, rows, finite), -jnp.inf)
        largest = jnp.maximum(jnp.max(logits, axis=-1), total)
        safe = jnp.where(jnp.isfinite(largest), largest, 0)
        return safe + jnp.log(
            jnp.exp(total - safe) + jnp.sum(jnp.exp(logits - safe[..., None]), axis=-1)
        )

    start = jnp.full((batch, heads, query_heads // heads, count), -jnp.inf, jnp.float32)
    if attention.sinks and inputs.sinks is not None:
        sinks = inputs.sinks.astype(jnp.float32).reshape(1, heads, -1, 1)
        start = jnp.broadcast_to(sinks, start.shape)
    normalizers = lax.fori_loop(0, -(-tokens // chunk), add, start)
    normalizers = jnp.where(jnp.isfinite(normalizers), normalizers, 0).reshape(
        batch, query_heads, count
    )
    return {"queries": queries, "normalizers": normalizers, "positions": positions}


def saliency(
    probes: Probes,
    keys: Float[Array, "B K T H"],
    positions: Int[Array, "#B T"],
    attention: Attention = PLAIN,
) -> Float[Array, "B K T"]:
    """Return the saliency of finite keys after RoPE at these positions."""
    heads = keys.shape[1]
    normalizers = probes["normalizers"].reshape(
        keys.shape[0], heads, -1, probes["positions"].shape[1]
    )
    logits = _logits(attention, _by_kv_head(probes["queries"], heads), keys)
    weights = jnp.exp(jnp.minimum(logits - normalizers[..., None], MAX_LOG))
    seen = _sees(attention, probes["positions"][:, :, None], positions[:, None])
    seen = seen | ~jnp.any(seen, axis=1, keepdims=True)
    count = jnp.sum(
        jnp.broadcast_to(seen, (seen.shape[0], weights.shape[3], seen.shape[2])), axis=1
    )
    total = jnp.sum(jnp.where(seen[:, None, None], weights, 0), axis=(2, 3)) / weights.shape[2]
    return total / count[:, None].astype(jnp.float32)


def _by_kv_head(queries: Float[Array, "B N P H"], heads: int) -> Float[Array, "B K G P H"]:
    batch, query_heads, count, channels = queries.shape
    return queries.astype(jnp.float32).reshape(batch, heads, query_heads // heads, count, channels)


def _sees(
    attention: Attention, probes: Int[Array, "B P _"], positions: Int[Array, "..."]
) -> Bool[Array, "B P T"]:
    return (probes >= positions) & inside_window(attention, probes, positions)


def _logits(
    attention: Attention, queries: Float[Array, "B K G P H"], keys: Float[Array, "B K T H"]
) -> Float[Array, "B K G P T"]:
    products = jnp.einsum("bkgph,bkth->bkgpt", queries, keys, precision=lax.Precision.HIGHEST)
    return attention_logits(attention, products, keys.shape[-1])
