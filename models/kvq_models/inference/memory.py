"""Count the memory that a cache needs besides its own bytes, from its layout. Nothing is
allocated."""

from __future__ import annotations

import dataclasses

import jax

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.types.array_types import ArraySpec
from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.layer_weights import layer_weights
from kvq_models.llama.model import abstract_llama

# dtype of full-precision rows when bytes are counted, whatever the model's dtype
CACHE_DTYPE = "bfloat16"


def parameter_bytes(cache: Cache, config: LlamaConfig, dtype: str) -> list[int]:
    """Return the bytes of each layer's parameters, calibrated or computed from its weights. Weights
    that are used unchanged do not count."""
    one = dataclasses.replace(config, num_hidden_layers=1)  # all layers have the same shapes
    weights = layer_weights(hf_names.describe(abstract_llama(one, dtype)).layers[0])
    weight_ids = {id(leaf) for leaf in jax.tree.leaves(weights)}

    def of(plan: LayerPlan) -> int:
        computed = {
            id(leaf): leaf
            for leaf in jax.tree.leaves(plan.from_weights(weights))
            if id(leaf) not in weight_ids
        }
        calibrated = [
            codec.learning.parameters(plan.heads) | codec.learning.derived(plan.heads)
            for codec in plan.codecs
        ]
        return kvq.nbytes([computed, *calibrated])

    return [of(plan) for plan in cache.plans]


def working_bytes(cache: Cache) -> int:
    """Return the bytes of the accumulator that flows through the layers of a step. There is one for
    all layers."""
    return max((kvq.nbytes(spec) for spec in accumulators(cache)), default=0)


def accumulators(cache: Cache) -> list[ArraySpec]:
    """Describe the accumulator of each layer that has one."""
    layers = ((plan.cross_layer, plan.regions) for plan in cache.plans)
    return [
        codec.accumulator(cache.batch, regions.held_capacity * regions.shards)
        for codec, regions in layers
        if codec
    ]
