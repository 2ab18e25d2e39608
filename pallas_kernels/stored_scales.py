"""The range of stored scales. Quantizers and kernels take it from here, so that codes agree."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def saturation_limit(dtype: DTypeLike) -> float:
    """Return the largest magnitude that is quantized without saturating.

    A group's range, its scale rounded up, must fit the stored dtype, in which kernels multiply a
    code by its scale.
    """
    known = jnp.finfo(dtype)
    return float(known.max) / 2 * (1 - float(known.eps))


def stored_scale(scale: Float[Array, "..."], dtype: DTypeLike, steps: int) -> Float[Array, "..."]:
    """Round a scale to the dtype in which it is stored, upwards below float16's normal numbers.

    There a step down could cost a large part of a group's range, and a scale of 0 all of it. A
    range of `steps` scales within half of the least number is 0.
    """
    return raised_scale(scale, dtype, steps).astype(dtype)


def raised_scale(scale: Float[Array, "..."], dtype: DTypeLike, steps: int) -> Float[Array, "..."]:
    """Return what `stored_scale` rounds to nearest: multiples of the least number below float16's
    normal numbers, and other scales as they are."""
    if jnp.dtype(dtype) != jnp.float16:
        return scale
    normal, minimum = 2.0**-14, 2.0**-24
    small = jnp.where(scale * steps < minimum / 2, 0.0, jnp.ceil(scale / minimum) * minimum)
    return jnp.where(scale < normal, small, scale)
