"""KV-cache quantization: specs, caches, and attention that reads packed bits.

import kvq_jax as kvq

dims = kvq.CacheDims(32, 32, 8, 128, 4096)
cache = kvq.init_cache("innerq:bits=2", dims, batch=1, capacity=4096)

step = kvq.begin(cache, tokens=1, prefill=False)      # in a decode step of any model
out, step = kvq.append_and_attend(step, q, k, v)      # in place of each layer's attention
cache = kvq.finish(step)

Names are imported when they are first used, so that reading a configuration does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from kvq_jax.cache.cache import (
        Cache,
        CacheDims,
        axes,
        has_prompt_statistics,
        init_cache,
        layout,
    )
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
    from kvq_jax.methods.registry import METHODS
    from kvq_jax.placement.placement import Placement
    from kvq_jax.types.array_types import ArraySpec, Axis, LayerInputs, LayerWeights, ModelDims
    from kvq_jax.types.rope import Rope, rotate

__version__ = "0.1.0"  # the distribution's version, which pyproject.toml reads from here

_MODULES = {
    "ArraySpec": "types.array_types",
    "Axis": "types.array_types",
    "Cache": "cache.cache",
    "CacheDims": "cache.cache",
    "CacheSpec": "cache.spec",
    "Damage": "cache.verification",
    "LayerInputs": "types.array_types",
    "LayerWeights": "types.array_types",
    "METHODS": "methods.registry",
    "ModelDims": "types.array_types",
    "OutlierTotals": "cache.accounting",
    "Overflow": "cache.overflow",
    "Placement": "placement.placement",
    "Rope": "types.rope",
    "Seal": "cache.verification",
    "Size": "cache.size",
    "Step": "cache.step",
    "append_and_attend": "cache.step",
    "axes": "cache.cache",
    "begin": "cache.step",
    "bits_per_element": "cache.accounting",
    "body_bits_per_element": "cache.accounting",
    "calibrate_layer": "cache.parameters",
    "components": "cache.accounting",
    "dense_nbytes": "cache.accounting",
    "dropped_outliers": "cache.accounting",
    "fingerprint": "cache.serialization",
    "finish": "cache.step",
    "has_prompt_statistics": "cache.cache",
    "init_cache": "cache.cache",
    "layout": "cache.cache",
    "load_beside": "cache.serialization",
    "load_cache": "cache.serialization",
    "merge_rows": "cache.row_operations",
    "move": "cache.moving",
    "nbytes": "cache.accounting",
    "outlier_fraction": "cache.accounting",
    "outlier_totals": "cache.accounting",
    "overflowed": "cache.overflow",
    "parse": "cache.spec",
    "prepare_layer": "cache.parameters",
    "quantized_tokens": "cache.accounting",
    "repeat_rows": "cache.row_operations",
    "replace_row": "cache.row_operations",
    "rotate": "types.rope",
    "roundtrip": "cache.roundtrip",
    "roundtrip_layer": "cache.roundtrip",
    "save_cache": "cache.serialization",
    "saved_layout": "cache.serialization",
    "seal": "cache.verification",
    "select_rows": "cache.row_operations",
    "size": "cache.size",
    "trim": "cache.row_operations",
    "unmet_options": "cache.accounting",
    "verify": "cache.verification",
}

__all__ = [
    "METHODS",
    "ArraySpec",
    "Axis",
    "Cache",
    "CacheDims",
    "CacheSpec",
    "Damage",
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
