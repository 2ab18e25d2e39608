"""Magnitudes of keys and values, and their errors when every token is quantized, by channel, on the
full-precision model's activations.

    magnitude[t, (k, c)] = |x[k, t, c]|                     x: keys after RoPE, or values;
                                                            k: KV head, c: channel
    error[(k, c)]        = mean_t |x^[k, t, c] - x[k, t, c]|
    relative             = ||x^ - x|| / ||x||               over all tokens and channels of a layer

x^ is `kvq_jax.cache.roundtrip_layer`, without a full-precision window. Every layer gets the
full-precision model's inputs, so errors do not accumulate over layers, except in methods that carry
state upwards.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.attention import Attention, of_layer
from kvq_jax.types.array_types import LayerInputs, RowsBKTH
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import Llama
from kvq_models.llama.rope import ropes_for
from kvq_tools.evaluation.forward import chunked_attention
from kvq_tools.report.schema import LayerErrors, LayerMagnitudes, PackedMatrix

MAX_LAYERS = 8  # layers whose magnitudes are kept
DIGITS = 4  # digits of an error


@jax.jit
def layer_inputs(llama: Llama, tokens: Int[Array, "T"]) -> tuple[LayerInputs, ...]:
    """Return the inputs of every layer of the full-precision model for one sequence."""
    positions = jnp.arange(tokens.size, dtype=jnp.int32)[None]
    valid = jnp.ones_like(positions, bool)
    rope = ropes_for(llama.config, tokens.size)
    hidden = llama.embed_tokens(tokens[None])
    collected = []
    for layer in llama.layers:
        inputs = layer.attention_inputs(hidden, positions, valid, rope)
        attended = chunked_attention(
            inputs.q_rot, inputs.k_rot, inputs.v, layer.attention, layer.sink_logits()
        )
        hidden = layer.finish(hidden, attended)
        collected.append(inputs)
    return tuple(collected)


def magnitudes(
    inputs: tuple[LayerInputs, ...], layers: tuple[int, ...]
) -> tuple[LayerMagnitudes, ...]:
    """Return |k| and |v| of some layers."""

    def packed(rows: RowsBKTH) -> PackedMatrix:
        rows_KTH = np.asarray(rows[0], np.float32)
        return PackedMatrix.of(np.abs(rows_KTH).swapaxes(0, 1).reshape(rows_KTH.shape[1], -1))

    return tuple(LayerMagnitudes(i, packed(inputs[i].k_rot), packed(inputs[i].v)) for i in layers)


def spread(layers: int) -> tuple[int, ...]:
    """Return at most MAX_LAYERS layers, evenly spaced, the first and the last among them."""
    return tuple(sorted({round(i) for i in np.linspace(0, layers - 1, min(layers, MAX_LAYERS))}))


def errors(
    llama: Llama, spec: CacheSpec, inputs: tuple[LayerInputs, ...]
) -> tuple[LayerErrors, ...]:
    """Return the errors of every layer. `llama` is prepared for the cache."""
    layers = jax.device_get(
        _errors(inputs, parameters_for(llama, spec), spec, llama.config.attention)
    )
    return tuple(
        LayerErrors(_number(k), _number(v), _numbers(keys), _numbers(values))
        for k, v, keys, values in layers
    )


@functools.partial(jax.jit, static_argnames=("spec", "attention"))
def _errors(
    inputs: tuple[LayerInputs, ...],
    parameters: Any,
    spec: CacheSpec,
    attention: tuple[Attention, ...],
) -> list[tuple[Array, ...]]:
    """Return (relative error of keys, of values, errors of keys [K H], of values [K H]) of every
    layer."""
    layers, carry = [], ()
    for number, (layer_inputs, layer_parameters) in enumerate(zip(inputs, parameters, strict=True)):
        keys, values, carry = kvq.cache.roundtrip_layer(
            spec, layer_inputs, layer_parameters, number, carry, of_layer(attention, number)
        )
        k, by_key = _compared(keys, layer_inputs.k_rot)
        v, by_value = _compared(values, layer_inputs.v)
        layers.append((k, v, by_key, by_value))
    return layers


def _compared(quantized: RowsBKTH, exact: RowsBKTH) -> tuple[Float[Array, ""], Float[Array, " KH"]]:
    exact = exact.astype(jnp.float32)
    difference = quantized.astype(jnp.float32) - exact
    norm = jnp.linalg.norm(exact.reshape(-1))
    relative = jnp.where(norm > 0, jnp.linalg.norm(difference.reshape(-1)) / norm, 0)
    return relative, jnp.mean(jnp.abs(difference[0]), axis=1).reshape(-1)


def _number(value: np.floating | Float[np.ndarray, ""]) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _numbers(values: Float[np.ndarray, "n"]) -> tuple[float | None, ...]:
    return tuple(map(_number, values))
