"""Read a window through quantized keys and values in one forward pass.

The prompt of a window is exact, as in the protocol: its keys and values come from the exact forward
pass. The tokens after it run layer by layer, all at once, and all but the first are scored. A query
at position p reads the first SINK and the newest tokens exactly and all others as a quantizer
returns them:

    body(p) = SINK + floor(max(0, p + 1 - SINK - RECENT) / BLOCK) * BLOCK
    s in [SINK, body(p))  is read quantized

So a scored token's own keys and values carry the errors of the layers before, and are quantized
once they leave the window. A cache's rows that age while others are scored are the same here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvq_jax.codecs.codec import Side
from kvq_jax.types.array_types import PositionsBT, RowsBKTH
from kvq_jax.types.rope import Rope, rotate
from kvq_models.llama.model import HiddenBTD, Layer, Llama, causal_attention
from kvq_models.llama.rope import Ropes, ropes_for
from kvq_tools.evaluation.protocol import RECENT, SINK

BLOCK = 32

# (layer, side, rows before RoPE [B, K, S, H], positions [1, S], rope) -> keys after RoPE, values
Quantizer = Callable[[int, Side, RowsBKTH, PositionsBT, Rope], RowsBKTH]


class Scene(NamedTuple):
    """Windows [B, S + 1] after one exact forward pass.

    keys, values: of the prompt, one [B, K, P, H] per layer, before RoPE, float16.
    logprobs: [B, T - 1, V] of the T tokens after the prompt but the first.
    """

    tokens: Int[np.ndarray, "B S"]
    prompt: int
    keys: list[np.ndarray]
    values: list[np.ndarray]
    logprobs: Float[np.ndarray, "B T-1 V"]


@jax.jit
def _exact(
    layer: Layer, hidden: HiddenBTD, positions: PositionsBT, ropes: Ropes
) -> tuple[HiddenBTD, RowsBKTH, RowsBKTH]:
    inputs = layer.attention_inputs(hidden, positions, positions >= 0, ropes)
    assert inputs.k_pre is not None
    attended = causal_attention(
        inputs.q_rot, inputs.k_rot, inputs.v, positions >= 0, layer.attention, None
    )
    return layer.finish(hidden, attended), inputs.k_pre, inputs.v


@jax.jit
def _projected(
    layer: Layer, hidden: HiddenBTD, positions: PositionsBT, ropes: Ropes
) -> tuple[Array, RowsBKTH, RowsBKTH]:
    inputs = layer.attention_inputs(hidden, positions, positions >= 0, ropes)
    assert inputs.k_pre is not None
    return inputs.q_rot, inputs.k_pre, inputs.v


@jax.jit
def _attended(
    layer: Layer,
    hidden: HiddenBTD,
    q: Array,
    exact: tuple[RowsBKTH, RowsBKTH],
    quantized: tuple[RowsBKTH, RowsBKTH],
    errors: Float[Array, "B K half"],
    positions: PositionsBT,
) -> HiddenBTD:
    """Attend over keys after RoPE and values, exact and quantized. Scores of quantized keys have
    1/2 sum_i errors_i |q_i|^2 / 2 added, with q_i the pairs of a query times the scale of scores.
    """
    batch, heads, length, width = q.shape
    kv_heads = exact[0].shape[1]
    scale = layer.attention.scale or width**-0.5
    q = q.reshape(batch, kv_heads, heads // kv_heads, length, width) * scale
    at, s = positions[0][:, None], jnp.arange(exact[0].shape[2])[None]
    body = SINK + jnp.maximum(0, at + 1 - SINK - RECENT) // BLOCK * BLOCK
    aged = (s >= SINK) & (s < body)
    first, second = jnp.split(jnp.square(q), 2, axis=-1)
    added = jnp.einsum("bkgti,bki->bkgt", first + second, errors)[..., None] / 4
    scores = jnp.where(
        aged,
        jnp.einsum("bkgth,bksh->bkgts", q, quantized[0]) + added,
        jnp.einsum("bkgth,bksh->bkgts", q, exact[0]),
    )
    weights = jax.nn.softmax(jnp.where(s <= at, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bksh->bkgth", jnp.where(aged, weights, 0), quantized[1])
    out += jnp.einsum("bkgts,bksh->bkgth", jnp.where(aged, 0, weights), exact[1])
    return layer.finish(hidden, out.reshape(batch, heads, length, width))


@functools.partial(jax.jit, static_argnames="prompt")
def _pair_errors(read: RowsBKTH, exact: RowsBKTH, prompt: int) -> Float[Array, "B K half"]:
    """Return the mean squared errors of the RoPE pairs of a prompt's keys that are quantized."""
    squares = jnp.mean(jnp.square(read - exact)[:, :, SINK:prompt], axis=2)
    first, second = jnp.split(squares, 2, axis=-1)
    return first + second


@jax.jit
def _logprobs(llama: Llama, hidden: HiddenBTD) -> Array:
    return jax.nn.log_softmax(llama.logits(hidden), axis=-1)


@jax.jit
def _kl(llama: Llama, hidden: HiddenBTD, logprobs: Array) -> Array:
    other = jax.nn.log_softmax(llama.logits(hidden), axis=-1)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - other), axis=-1)


def scene_of(llama: Llama, windows: Int[np.ndarray, "B S"], prompt: int) -> Scene:
    """Run full precision over windows of prompt + T + 1 tokens."""
    tokens = windows[:, :-1]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    ropes = ropes_for(llama.config, tokens.shape[1])
    hidden = llama.embed_tokens(jnp.asarray(tokens, jnp.int32))
    keys, values = [], []
    for layer in llama.layers:
        hidden, k, v = _exact(layer, hidden, positions, ropes)
        keys.append(np.asarray(k[:, :, :prompt], np.float32))
        values.append(np.asarray(v[:, :, :prompt], np.float32))
    logprobs = np.concatenate(
        [np.asarray(_logprobs(llama, one[None, prompt + 1 :])) for one in hidden]
    )
    return Scene(tokens, prompt, keys, values, logprobs)


def kl_through(
    llama: Llama, scene: Scene, quantize: Quantizer, sides: str = "kv", expected: bool = False
) -> Float[np.ndarray, "B T-1"]:
    """Return the KL divergence of each scored token from full precision, in nats.

    sides: the sides that are read quantized, "k", "v" or "kv".
    expected: True if quantized tokens get the weights that are expected of normal errors of the
        size that keys of the prompt have: E exp(s + e) = exp(s + E e^2 / 2).
    """
    length = scene.tokens.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    new, ropes = positions[:, scene.prompt :], ropes_for(llama.config, length)
    hidden = llama.embed_tokens(jnp.asarray(scene.tokens[:, scene.prompt :], jnp.int32))
    for index, layer in enumerate(llama.layers):
        rope = layer.rope(ropes)
        q, k, v = _projected(layer, hidden, new, ropes)
        k = jnp.concatenate([scene.keys[index], k], axis=2)
        v = jnp.concatenate([scene.values[index], v], axis=2)
        k_rot = _rotated(k, positions, rope)
        k_read = quantize(index, "k", k, positions, rope) if "k" in sides else k_rot
        v_read = quantize(index, "v", v, positions, rope) if "v" in sides else v
        errors = _pair_errors(k_read, k_rot, scene.prompt) * float(expected)
        hidden = _attended(layer, hidden, q, (k_rot, v), (k_read, v_read), errors, new)
    return np.concatenate(
        [
            np.asarray(_kl(llama, one[None, 1:], logprobs[None]))
            for one, logprobs in zip(hidden, scene.logprobs, strict=True)
        ]
    )


_rotated = jax.jit(rotate)
