"""The weights of a new model, or only their shapes: a checkpoint replaces them all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

STDDEV = 0.02


def normal(rngs: nnx.Rngs | None, *shape: int, dtype: DTypeLike) -> nnx.Param[Any]:
    """Return a weight from N(0, STDDEV^2), or a ShapeDtypeStruct in its place without `rngs`."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(STDDEV * jax.random.normal(rngs.params(), shape, dtype))


def constant(rngs: nnx.Rngs | None, value: float, *shape: int, dtype: DTypeLike) -> nnx.Param[Any]:
    """Return a weight of one value, or a ShapeDtypeStruct in its place without `rngs`."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(jnp.full(shape, value, dtype))
