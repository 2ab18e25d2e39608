"""The cache as a whole: specs, allocation, updates, row operations, files, and byte counts."""

from kvq_jax.cache.cache import Cache, axes, has_prompt_statistics, layout
from kvq_jax.cache.layer_cache import LayerCache
from kvq_jax.cache.layer_plans import CachePlan
from kvq_jax.cache.roundtrip import roundtrip_layer
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.cache.step import Step

__all__ = [
    "Cache",
    "CachePlan",
    "CacheSpec",
    "LayerCache",
    "Step",
    "axes",
    "has_prompt_statistics",
    "layout",
    "roundtrip_layer",
]
