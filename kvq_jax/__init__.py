"""KV-cache quantization: specs, caches, and attention that reads packed bits.

import kvq_jax as kvq

dims = kvq.CacheDims(32, 32, 8, 128, 4096)
cache = kvq.init_cache("innerq:bits=2", dims, batch=1, capacity=4096)

step = kvq.begin(cache, tokens=1, prefill=False)      # in a decode step of any model
out, step = kvq.append_and_attend(step, q, k, v)      # in place of each layer's attention
cache = kvq.finish(step)
"""

from kvq_jax.cache.accounting import (
    OutlierTotals,
    bits_per_element,
    body_bits_per_element,
    components,
    dense_nbytes,
    dropped_outliers,
    nbytes,
    outlier_fraction,
    outlier_totals,
    quantized_tokens,
    unmet_options,
)
from kvq_jax.cache.cache import Cache, CacheDims, axes, has_prompt_statistics, init_cache, layout
from kvq_jax.cache.layer_cache import CachePlan, LayerCache, layer_plan
from kvq_jax.cache.moving import move
from kvq_jax.cache.overflow import Overflow, overflowed
from kvq_jax.cache.parameters import calibrate_layer, prepare_layer
from kvq_jax.cache.roundtrip import roundtrip, roundtrip_layer
from kvq_jax.cache.row_operations import merge_rows, repeat_rows, replace_row, select_rows, trim
from kvq_jax.cache.serialization import (
    fingerprint,
    load_beside,
    load_cache,
    save_cache,
    saved_layout,
)
from kvq_jax.cache.size import Size, size
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.cache.step import Step, append_and_attend, begin, finish
from kvq_jax.cache.verification import Damage, Seal, seal, verify
from kvq_jax.layer.attention import Attention
from kvq_jax.methods.registry import METHODS
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import ArraySpec, Axis, LayerInputs, LayerWeights, ModelDims
from kvq_jax.types.rope import Rope, rotate

__version__ = "0.1.0"  # the distribution's version, which pyproject.toml reads from here

__all__ = [
    "METHODS",
    "ArraySpec",
    "Attention",
    "Axis",
    "Cache",
    "CacheDims",
    "CachePlan",
    "CacheSpec",
    "Damage",
    "LayerCache",
    "LayerInputs",
    "LayerWeights",
    "ModelDims",
    "OutlierTotals",
    "Overflow",
    "Placement",
    "Rope",
    "Seal",
    "Size",
    "Step",
    "__version__",
    "append_and_attend",
    "axes",
    "begin",
    "bits_per_element",
    "body_bits_per_element",
    "calibrate_layer",
    "components",
    "dense_nbytes",
    "dropped_outliers",
    "fingerprint",
    "finish",
    "has_prompt_statistics",
    "init_cache",
    "layer_plan",
    "layout",
    "load_beside",
    "load_cache",
    "merge_rows",
    "move",
    "nbytes",
    "outlier_fraction",
    "outlier_totals",
    "overflowed",
    "parse",
    "prepare_layer",
    "quantized_tokens",
    "repeat_rows",
    "replace_row",
    "rotate",
    "roundtrip",
    "roundtrip_layer",
    "save_cache",
    "saved_layout",
    "seal",
    "select_rows",
    "size",
    "trim",
    "unmet_options",
    "verify",
]
