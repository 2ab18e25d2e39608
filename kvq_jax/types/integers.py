"""Check the integers that a caller passes (token ids, lengths, row numbers): a cast would wrap or
truncate values that do not fit."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32

from kvq_jax.types.array_types import Integers

INT32 = np.iinfo(np.int32)


def int32(name: str, values: Integers) -> Int32[np.ndarray | Array, "..."]:
    """Return integers as int32: a JAX array if one is passed, else a NumPy array.

    Raise ValueError, in one line that calls the values `name`, if they are not integers (floats,
    booleans, rows of unequal lengths) or one does not fit int32. Only the dtype of traced values is
    checked.
    """
    array = values if isinstance(values, jax.Array) else _array(name, values)
    if not array.size and not isinstance(array, jax.Array):
        return array.astype(np.int32)  # NumPy gives an empty list a float dtype
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {_shown(array)}")
    if array.dtype == np.int32:
        return array
    if isinstance(array, Tracer):
        return array.astype(jnp.int32)
    host = np.asarray(array)
    outside = (host < INT32.min) | (host > INT32.max)
    if outside.any():
        raise ValueError(f"{name} must fit int32, got {host[outside].flat[0]}")
    return host.astype(np.int32)


def positive(name: str, value: Any) -> int:
    """Return one integer of at least 1, of whatever type, as an int.

    Raise ValueError, in one line that calls it `name`, for anything else. NumPy's integers would
    make traced arrays of sizes that must be static.
    """
    number = integer(value, 1)
    if number is None:
        if isinstance(value, Tracer):
            raise ValueError(f"{name} must be an integer that is known when a program is traced")
        if shape := getattr(value, "shape", ()):
            raise ValueError(f"{name} must be one integer, got an array {list(shape)}")
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    return number


def integer(value: Any, minimum: int) -> int | None:
    """Return one integer, of whatever type, as an int, and None for anything else or an integer
    below `minimum`."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return None if isinstance(value, bool) or number < minimum else number


def check_at_most(name: str, values: Integers, maximum: int) -> None:
    """Raise ValueError, in one line that calls them `name`, if values are not integers from 0 to
    `maximum`. Traced values are not checked, nor those of which other processes hold a part."""
    if isinstance(values, Tracer) or not _is_here(values):
        return
    host = np.asarray(int32(name, values))
    outside = (host < 0) | (host > maximum)
    if outside.any():
        raise ValueError(f"{name} must be between 0 and {maximum}, got {host[outside].flat[0]}")


def _is_here(values: Integers) -> bool:
    on_devices = isinstance(values, jax.Array)
    return not on_devices or values.is_fully_addressable or values.is_fully_replicated


def _array(name: str, values: Integers) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # NumPy's own message is about "inhomogeneous shapes"
        raise ValueError(
            f"{name} must be integers in an array, and the rows given have different lengths"
        ) from None


def _shown(array: np.ndarray | Array) -> str:
    """Return the first value, if there is one and it is known, and the dtype."""
    if isinstance(array, Tracer) or not array.size:
        return array.dtype.name
    return f"{np.asarray(array).flat[0]!s} of {array.dtype.name}"
