"""KV-cache quantization: specs, caches, and attention that reads packed bits.

import kvq_jax as kvq

spec = kvq.parse("innerq:bits=2")
cache = kvq.init_cache(spec, config, batch=1, capacity=4096)
"""

from kvq_jax.array_types import ArraySpec, Axis, LayerInputs
from kvq_jax.cache.accounting import (
    bits_per_element,
    body_bits_per_element,
    components,
    dense_nbytes,
    dropped_outliers,
    nbytes,
    outlier_fraction,
    quantized_tokens,
)
from kvq_jax.cache.cache import Cache, axes, init_cache, layout
from kvq_jax.cache.roundtrip import roundtrip, roundtrip_layer
from kvq_jax.cache.row_operations import merge_rows, repeat_rows, select_rows, trim
from kvq_jax.cache.serialization import fingerprint, load_cache, save_cache
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.methods.registry import METHODS
from kvq_jax.rope import Rope

__version__ = "0.1.0"  # the distribution's: pyproject.toml reads it here

__all__ = [
    "METHODS",
    "ArraySpec",
    "Axis",
    "Cache",
    "CacheSpec",
    "LayerInputs",
    "Rope",
    "__version__",
    "axes",
    "bits_per_element",
    "body_bits_per_element",
    "components",
    "dense_nbytes",
    "dropped_outliers",
    "fingerprint",
    "init_cache",
    "layout",
    "load_cache",
    "merge_rows",
    "nbytes",
    "outlier_fraction",
    "parse",
    "quantized_tokens",
    "repeat_rows",
    "roundtrip",
    "roundtrip_layer",
    "save_cache",
    "select_rows",
    "trim",
]
