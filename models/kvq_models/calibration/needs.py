"""The sides of a cache's layers that need calibrated parameters."""

from __future__ import annotations

from typing import NamedTuple

from kvq_jax.cache.cache import dims_of
from kvq_jax.cache.parameters import parameter_plans
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method
from kvq_jax.types.array_types import ArraySpec, ModelDims


class Need(NamedTuple):
    """One side of one layer that needs parameters. `options` spells out everything they depend on:
    parameters fitted for equal options are interchangeable."""

    layer: int
    side: Side
    codec: Codec
    options: str
    parameters: dict[str, ArraySpec]


def needs(spec: CacheSpec, config: ModelDims) -> dict[str, Need]:
    """Return the needs of `spec` for this model as {"layers.0.k": Need, ...}, or {} for methods
    without parameters.

    Raises ValueError if the spec does not fit the model.
    """
    needed = {}
    dims = dims_of(config)
    for layer, plan in enumerate(parameter_plans(spec, dims)):
        sides: tuple[tuple[Side, Method, Codec], ...] = (
            ("k", spec.k, plan.k),
            ("v", spec.v, plan.v),
        )
        for side, method, codec in sides:
            parameters = codec.learning.parameters(plan.heads)
            if parameters and not codec.learning.brought:
                needed[f"layers.{layer}.{side}"] = Need(
                    layer, side, codec, f"{method.name}:{codec.learning.key}", parameters
                )
    return needed
