"""The scales of an fp8 cache that a checkpoint brings: key ~ e4m3(key / k_scale) * k_scale, and the
same for values.

Publishers write one number for all heads of a layer, or one for each KV head. Sources:
compressed-tensors (`kv_cache_scheme` and self_attn.k_scale), AMD Quark (kv_cache_scheme "static"),
AutoFP8 (self_attn.kv_scale, of both sides, and k_proj.output_scale), ModelOpt (kv_cache_quant_algo
and k_proj.k_scale).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvq_models.llama.config_fields import quantization_fields
from kvq_models.llama.quantized.stored_parts import FLOATS
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor

# scales of the KV heads by layer, for keys and for values
KVScales = tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
NAMES = (
    "{side}_scale",
    "{side}_proj.{side}_scale",
    "{side}_proj.output_scale",
    "kv_scale",
)


def brings_kv_scales(hf: Mapping[str, Any]) -> bool:
    """Return True if config.json says that the files have the scales of an fp8 (E4M3) cache. Other
    schemes, such as int8 or scales of each token, are not used."""
    stated = quantization_fields(hf)
    fields = stated if isinstance(stated, Mapping) else {}
    scheme = fields.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return scheme == "static" or fields.get("kv_cache_quant_algo") == "FP8"
    return (
        scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("symmetric") is not False
        and not scheme.get("dynamic")
        and scheme.get("strategy") in ("tensor", "attn_head", None)
    )


def read_kv_scales(
    stored: Mapping[str, StoredTensor],
    read_stored: Callable[[StoredTensor], np.ndarray],
    layers: int,
    kv_heads: int,
) -> KVScales | None:
    """Return the scales of every layer, or None if a layer has none.

    Raises CheckpointError for scales of another shape or type, and for numbers that are not finite
    and positive.
    """
    found = []
    for layer in range(layers):
        both = []
        for side in "kv":
            names = (f"model.layers.{layer}.self_attn.{n.format(side=side)}" for n in NAMES)
            name = next((name for name in names if name in stored), None)
            if name is None:
                return None
            both.append(_scales(name, stored[name], read_stored, kv_heads))
        found.append(tuple(both))
    return tuple(found)


def _scales(
    name: str,
    stored: StoredTensor,
    read_stored: Callable[[StoredTensor], np.ndarray],
    kv_heads: int,
) -> tuple[float, ...]:
    count = int(np.prod(stored.shape))
    if stored.dtype not in FLOATS or count not in (1, kv_heads):
        raise CheckpointError(
            f"tensor {name!r} is {stored.dtype} of shape {list(stored.shape)}: a scale of the cache"
            f" is a float for all heads, or one for each of {kv_heads} KV heads"
        )
    in_file = dataclasses.replace(stored, stored_as=stored.stored_as or name)
    values = read_stored(in_file).astype(np.float32).reshape(-1)
    fits = np.isfinite(values) & (values > 0)
    if not fits.all():
        raise CheckpointError(
            f"tensor {name!r} holds {values[~fits][0]}: a scale of the cache is finite and positive"
        )
    return tuple(float(value) for value in np.broadcast_to(values, (kv_heads,)))
