"""Turn the arrays of a host's call into those that a layer takes, heads first and padded on the
right, and back."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import int32

Layout = Literal["BTNH", "BNTH"]
Padding = Literal["right", "left"]
Rows = Float[Array, "B _ _ H"]  # in the layout of the call


def check_layout(layout: str) -> None:
    """Raise ValueError if arrays have no such layout."""
    if layout not in ("BTNH", "BNTH"):
        raise ValueError(f"{layout=}: choose 'BTNH' or 'BNTH'")


def tokens_of(name: str, array: Rows, layout: Layout) -> int:
    """Return T, the new tokens of an array of heads. Raise ValueError unless it is one."""
    check_layout(layout)
    shape = getattr(array, "shape", ())
    if len(shape) != 4:
        given = shape or type(array).__name__
        raise ValueError(f"{name} must be an array [{', '.join(layout)}], got {given}")
    if not (tokens := shape[layout.index("T")]):
        raise ValueError(f"{name} must hold at least one token, got shape {list(shape)}")
    return tokens


def check_floats(name: str, array: Array) -> None:
    """Raise ValueError if an array holds no floats: codes are made of them, and attention has the
    dtype of q."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must hold floats, such as float32, got {array.dtype}")


def turned(
    name: str, array: Array | None, layout: Layout, shift: Int[Array, " B"] | None
) -> Array | None:
    """Return an array of a call, which `name` says the axes of, as a layer takes it: without
    shift[b] tokens of padding on the left."""
    if array is None or name == "sinks":
        return array
    if name in ("x", "residual"):
        return shifted(array, shift, axis=1)
    return shifted(array if layout == "BNTH" else jnp.swapaxes(array, 1, 2), shift, axis=2)


def left_padding(
    tokens: int, lengths: Integers | None, padding: Padding
) -> Int[Array, " B"] | None:
    """Return the padding [B] on the left of each row, or None if there is none to remove. A single
    token is real or padding, whatever the side."""
    if padding not in ("right", "left"):
        raise ValueError(f"{padding=}: choose 'right' or 'left'")
    if padding == "right" or lengths is None or tokens == 1:
        return None
    return tokens - jnp.clip(jnp.asarray(int32("lengths", lengths)), 0, tokens)


def shifted(array: Array, shift: Int[Array, " B"] | None, axis: int) -> Array:
    """Return rows rolled to the left by shift[b] tokens: padding on the left comes to the right."""
    if shift is None:
        return array
    tokens = array.shape[axis]
    index = (jnp.arange(tokens, dtype=jnp.int32)[None] + shift[:, None]) % tokens
    shape = [len(index) if a == 0 else tokens if a == axis else 1 for a in range(array.ndim)]
    return jnp.take_along_axis(array, index.reshape(shape), axis=axis, mode="clip")


def unshifted(array: Array, shift: Int[Array, " B"] | None, axis: int) -> Array:
    """Undo `shifted`."""
    return shifted(array, None if shift is None else -shift, axis)
