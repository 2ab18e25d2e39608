"""The attention of one call: the plan's, with what the call sets for itself."""

from __future__ import annotations

import dataclasses
import functools

from jax.core import Tracer
from jaxtyping import Array

from kvq_jax.cache.dims import CacheDims
from kvq_jax.cache.spec import parse
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan


def attending(
    plan: LayerPlan,
    spec: str,
    layer: int,
    dims: CacheDims,
    dtype: str,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
    lse: bool,
) -> LayerPlan:
    """Return the plan with the attention of one call. Raise ValueError, in one line, if a setting
    is traced, the window is another, or sinks are missing."""
    settings = {"scale": scale, "window": window, "soft_cap": soft_cap, "lse": lse}
    for name, value in settings.items():
        if isinstance(value, Tracer):
            instead = {"scale": "multiply q by it instead", "lse": "give True or False"}
            raise ValueError(f"{name} is static: {instead.get(name, 'give a number of Python')}")
    planned, capacity = plan.attention, plan.regions.capacity
    if window is not None and Attention(window).within(capacity).window != planned.window:
        raise ValueError(
            f"{window=}, but the cache is made for window={planned.window}: give layer_plan"
            f" attention=kvq.Attention(window={window})"
        )
    check_sinks(layer, planned.sinks or sinks is not None, sinks)
    attention = dataclasses.replace(
        planned,
        scale=planned.scale if scale is None else scale,
        soft_cap=planned.soft_cap if soft_cap is None else soft_cap,
        sinks=sinks is not None,
    )
    asked = dataclasses.replace(plan, attention=attention, lse=bool(lse))
    return _with_codecs_for_attention(asked, spec, layer, dims, dtype)


def check_sinks(layer: int, expected: bool, sinks: Array | None) -> None:
    """Raise ValueError if the layer's attention has sinks and none are given, or the other way
    round."""
    if expected != (sinks is not None):
        have = "has sinks" if expected else "has no sinks"
        raise ValueError(
            f"the attention of layer {layer} {have}, and sinks are"
            f" {'missing' if expected else 'given'}: pass [N] logits for layers that have them"
        )


@functools.lru_cache(256)
def _with_codecs_for_attention(
    plan: LayerPlan, spec: str, layer: int, dims: CacheDims, dtype: str
) -> LayerPlan:
    """Return the plan with the codecs of its attention, which may depend on it (zipcache)."""
    dims = dims.attending(plan.attention)
    made = parse(spec).layer(layer, dims, plan.regions.capacity, dtype)
    return dataclasses.replace(plan, k=made.k, v=made.v)
