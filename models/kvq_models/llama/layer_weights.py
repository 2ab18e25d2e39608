"""The weights of a layer that cache methods build on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvq_jax.types.array_types import ArraySpec, LayerWeights
from kvq_models.llama.model import Layer, RMSNorm
from kvq_models.llama.packed_weights import dense


def layer_weights(layer: Layer) -> LayerWeights | None:
    """Return the weights of a layer that cache methods may build on: the model's arrays, or their
    descriptions in an abstract model. None if the layer does not make its keys as `LayerWeights`
    says (OLMo 2)."""
    if layer.input_norm is None or layer.config.joint_qk_norm:
        return None
    k, v, norm = layer.k_proj, layer.v_proj, layer.k_norm
    return LayerWeights(
        k_kernel=dense(k.kernel.get_value()),
        v_kernel=dense(v.kernel.get_value()),
        k_bias=None if k.bias is None else k.bias.get_value(),
        v_bias=None if v.bias is None else v.bias.get_value(),
        k_norm=None if norm is None else _factor(norm),
        input_norm=_factor(layer.input_norm),
        norm_eps=jnp.asarray(layer.input_norm.eps, jnp.float32),
    )


def _factor(norm: RMSNorm) -> Any:
    """Return the factor of each channel, or its description in an abstract model."""
    scale = norm.scale.get_value()
    if not norm.unit_offset:
        return scale
    if isinstance(scale, jax.Array):
        return norm.factor()
    if isinstance(scale, ArraySpec):
        return dataclasses.replace(scale, dtype="float32")
    return jax.ShapeDtypeStruct(scale.shape, jnp.float32)
