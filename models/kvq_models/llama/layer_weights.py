"""The weights of a layer that cache methods build on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvq_jax.cache.cache import plans_for
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.bias_subtracting import check_bias
from kvq_jax.types.array_types import ArraySpec, LayerWeights
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Layer, RMSNorm, abstract_llama
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


def check_weights(spec: CacheSpec, config: LlamaConfig) -> None:
    """Raise ValueError, in one line, if the spec needs weights that a model of this config does
    not have."""
    plan = plans_for(spec, config)[0]
    if not spec.subtract_bias and not any(codec.facts.rebuilds for codec in plan.codecs):
        return
    weights = layer_weights(
        abstract_llama(dataclasses.replace(config, num_hidden_layers=1)).layers[0]
    )
    if weights is None:
        raise ValueError(
            f"{str(spec)!r} builds on a layer's weights, which {config.model_type} uses in another"
            " order: take a cache of keys and values alone, such as 'kivi:bits=4'"
        )
    if spec.subtract_bias:
        check_bias(weights)
