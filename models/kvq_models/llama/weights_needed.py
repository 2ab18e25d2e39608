"""Refuse a cache that builds on weights which a model does not have."""

from __future__ import annotations

import dataclasses

from kvq_jax.cache.cache import plans_for
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.bias_subtracting import check_bias
from kvq_models.llama.config import LlamaConfig


def check_weights(spec: CacheSpec, config: LlamaConfig) -> None:
    """Raise ValueError, in one line, if the spec needs weights that a model of this config does
    not have."""
    plan = plans_for(spec, config)[0]
    if not spec.subtract_bias and not any(codec.facts.rebuilds for codec in plan.codecs):
        return
    # imported late: they need Flax, and few caches get here
    from kvq_models.llama.layer_weights import layer_weights
    from kvq_models.llama.model import abstract_llama

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
