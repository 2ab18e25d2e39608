"""Whole numbers that a caller gives (token ids, lengths, row numbers), checked as they come: a cast
would wrap or cut what does not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32

from kvq_jax.types.array_types import Integers

INT32 = np.iinfo(np.int32)


def int32(name: str, values: Integers) -> Int32[np.ndarray | Array, "..."]:
    """Return integers as int32: an array of JAX where one is given, else an array of NumPy.

    Raises ValueError, in one line that calls the values `name`, where they are no integers (floats,
    truth values, rows of unequal lengths) or one is outside int32. Of traced values only the dtype
    is checked.
    """
    given = values if isinstance(values, jax.Array) else _array(name, values)
    if not given.size and not isinstance(given, jax.Array):
        return given.astype(np.int32)  # an empty list has no dtype of its own
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {_shown(given)}")
    if given.dtype == np.int32:
        return given
    if isinstance(given, Tracer):
        return given.astype(jnp.int32)
    host = np.asarray(given)
    outside = (host < INT32.min) | (host > INT32.max)
    if outside.any():
        raise ValueError(f"{name} must fit int32, got {host[outside].flat[0]}")
    return host.astype(np.int32)


def _array(name: str, values: Integers) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # NumPy's own message is about "inhomogeneous shapes"
        raise ValueError(
            f"{name} must be integers in an array, and the rows given have different lengths"
        ) from None


def _shown(array: np.ndarray | Array) -> str:
    """Return what stands in the place of integers: the first value where there is one to see, and
    the dtype."""
    first = (
        "" if isinstance(array, Tracer) or not array.size else f"{np.asarray(array).flat[0]!s} of "
    )
    return f"{first}{array.dtype.name}"
