"""Names of kvq_jax that moved to groups. The old ones warn, and go with the next release."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

MOVED = {
    "METHODS": "methods.METHODS",
    "ArraySpec": "types.ArraySpec",
    "Axis": "types.Axis",
    "Cache": "cache.Cache",
    "CachePlan": "cache.CachePlan",
    "CacheSpec": "cache.CacheSpec",
    "Damage": "files.Damage",
    "LayerCache": "cache.LayerCache",
    "LayerInputs": "types.LayerInputs",
    "LayerWeights": "types.LayerWeights",
    "ModelDims": "types.ModelDims",
    "OutlierTotals": "size.OutlierTotals",
    "Overflow": "size.Overflow",
    "Rope": "types.Rope",
    "Seal": "files.Seal",
    "Size": "size.Size",
    "Step": "cache.Step",
    "axes": "cache.axes",
    "bits_per_element": "size.bits_per_element",
    "body_bits_per_element": "size.body_bits_per_element",
    "calibrate_layer": "parameters.calibrate",
    "components": "size.components",
    "dense_nbytes": "size.dense_nbytes",
    "dropped_outliers": "size.dropped_outliers",
    "fingerprint": "files.fingerprint",
    "has_prompt_statistics": "cache.has_prompt_statistics",
    "layout": "cache.layout",
    "load_beside": "files.load_beside",
    "load_cache": "files.load",
    "merge_rows": "rows.merge",
    "move": "rows.move",
    "nbytes": "size.nbytes",
    "outlier_fraction": "size.outlier_fraction",
    "outlier_totals": "size.outlier_totals",
    "overflowed": "size.overflowed",
    "prepare_layer": "parameters.prepare",
    "quantized_tokens": "size.quantized_tokens",
    "repeat_rows": "rows.repeat",
    "replace_row": "rows.replace",
    "rotate": "types.rotate",
    "roundtrip_layer": "cache.roundtrip_layer",
    "save_cache": "files.save",
    "saved_layout": "files.saved_layout",
    "seal": "files.seal",
    "select_rows": "rows.select",
    "trim": "rows.trim",
    "unmet_options": "size.unmet_options",
    "verify": "files.verify",
}


def moved(name: str) -> Any:
    """Return the value of an old name of kvq_jax, with a warning that has the new one."""
    warnings.warn(
        f"kvq_jax.{name} is now kvq_jax.{MOVED[name]}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    group, new = MOVED[name].split(".")
    return getattr(importlib.import_module(f"kvq_jax.{group}"), new)
