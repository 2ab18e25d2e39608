"""The arithmetic of kernel.py: from a group's range to its scale, its zero point and the constants
that turn its elements into codes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.stored_scales import saturation_limit, stored_scale
from pallas_kernels.tiles.arithmetic import multiply_add

Scheme = Literal["asym", "sym", "hybrid"]
Number = Any  # an array that broadcasts to the tile, or a float

_ROUND = 1.5 * 2**23  # fp32 numbers of this size are whole, and their low bits count from it
_MIN_NORMAL = float(np.finfo(np.float32).tiny)


class Quantizer(NamedTuple):
    """Constants that turn the elements of groups into codes: round((x - origin) * inverse + first)
    - near, clipped to 0 .. top.

    They broadcast to the groups' tiles. scale and zero are rounded as they are stored, but in fp32.
    first is Job.near, except in groups of zeros.
    """

    scale: Number
    zero: Number
    origin: Number
    inverse: Number
    first: Number
    top: Number


@dataclasses.dataclass(frozen=True)
class Job:
    """Static facts of a launch, and the arithmetic that both kernels share."""

    reader: GroupedReader
    scheme: Scheme
    bits: int
    divided: bool
    spans: int
    asm: bool

    @property
    def reach(self) -> int:
        return 2**self.bits - 1

    @property
    def limit(self) -> float:
        return saturation_limit(self.reader.scale_dtype)

    @property
    def near(self) -> float:
        """Return the size of an fp32 number that is a multiple of 2^(code bits - 21)."""
        return _ROUND * 2.0 ** (self.reader.layout.bits - 21)

    def schemes(self, low: Array, high: Array) -> list[Quantizer]:
        """Return the quantizers of groups with these ranges: asym, sym or, for hybrid, both."""
        return [
            make(low, high)
            for name, make in (("asym", self._asym), ("sym", self._sym))
            if self.scheme in (name, "hybrid")
        ]

    def _asym(self, low: Array, high: Array) -> Quantizer:
        scale, zero = self._scale((high - low) / self.reach), self.stored(low)
        inverse = 1.0 / jnp.where(scale < _MIN_NORMAL, 1.0, scale)
        return Quantizer(scale, zero, zero, inverse, self.near, float(self.reach))

    def _sym(self, low: Array, high: Array) -> Quantizer:
        scale = self._scale(jnp.maximum(-low, high) / self.reach)
        exact = scale * -float(self.reach)
        empty = scale < _MIN_NORMAL  # a group of zeros has its middle code everywhere
        inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, scale))
        first = jnp.where(empty, self.near + self.reach, self.near)
        return Quantizer(scale, self.stored(exact), exact, inverse, first, 2.0 * self.reach)

    def _scale(self, scale: Array) -> Array:
        return stored_scale(scale, self.reader.scale_dtype, self.reach).astype(jnp.float32)

    def stored(self, zero: Array) -> Array:
        """Round a zero point to the stored dtype, and return it in fp32."""
        return zero.astype(self.reader.scale_dtype).astype(jnp.float32)

    def levels(self, x: Array, quantizer: Quantizer) -> Array:
        """Return _ROUND + code of each element, exactly."""
        # max and min separate the additions of constants, which XLA would otherwise combine when it
        # interprets the kernel.
        q = jnp.maximum(
            self._multiply_add(x - quantizer.origin, quantizer.inverse, quantizer.first), self.near
        )
        return jnp.minimum(q + (_ROUND - self.near), _ROUND + quantizer.top)

    def error(self, x: Array, level: Array, quantizer: Quantizer) -> Array:
        """Return the distance of each element from its dequantized code."""
        return jnp.abs(self._multiply_add(level - _ROUND, quantizer.scale, quantizer.zero) - x)

    def _multiply_add(self, a: Array, b: Number, c: Number) -> Array:
        if not self.asm:
            return a * b + c
        return multiply_add(
            a, *(jnp.broadcast_to(jnp.asarray(n, jnp.float32), a.shape) for n in (b, c)), asm=True
        )


def is_plain(low: Array, high: Array, total: Array, limit: float) -> Bool[Array, ""]:
    """Return True if all elements are finite and within the limit.

    Args:
        low: minima of elements.
        high: maxima of elements.
        total: sums of elements, which are non-finite if any element is. The GPU's min and max
            ignore NaN.
        limit: the largest magnitude.
    """
    worst = jnp.where(jnp.abs(total) < jnp.inf, jnp.maximum(-low, high), jnp.inf)
    while worst.ndim:
        worst = jnp.max(worst, axis=0)
    return worst <= limit


def finite_or(x: Array, otherwise: float) -> Array:
    """Replace non-finite elements."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, otherwise)


def within_limit(bound: Array, limit: float) -> Array:
    """Clip a minimum or maximum of finite elements to the limit, or return 0 if there were none."""
    return jnp.clip(finite_or(bound, 0.0), -limit, limit)


def cleaned(x: Array, low: Array, high: Array) -> Array:
    """Replace infinite elements by the group's extremes, and NaN by the value of its range nearest
    zero.
    """
    return jnp.clip(jnp.where(x == x, x, 0.0), low, high)


def fold(operation: Callable[[Array, Array], Array], tiles: Sequence[Array]) -> Array:
    """Combine tiles in their order."""
    return functools.reduce(operation, tiles)
