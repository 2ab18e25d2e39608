"""Floats of few bits: a sign, e exponent bits and m mantissa bits, with subnormal numbers and
without infinities.

    code = sign | field | mantissa
    |x|  = 2^(field - bias) (1 + mantissa / 2^m)
    |x|  = 2^(1 - bias) mantissa / 2^m                  if field = 0

`encode` rounds to the nearest number, to the even mantissa on a tie, and saturates. `decode` is a
shift of the code's bits and a multiplication by a power of two: no table, and no dtype of 8 bits,
which not every backend has. Source: Open Compute Project, OFP8 (2023) and Microscaling Formats (MX)
specification 1.0, section 5.3.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt16


@dataclasses.dataclass(frozen=True)
class Minifloat:
    """A format of 1 + exponent + mantissa bits.

    largest: the largest number. Larger ones saturate there.
    """

    exponent: int
    mantissa: int
    largest: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the least normal number and of all subnormal ones."""
        return 1 - self.bias


# float8_e4m3fn. The code with every bit set is NaN and is never written.
E4M3 = Minifloat(4, 3, 448.0)
E2M1 = Minifloat(2, 1, 6.0)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6


def encode(x: Float[Array, "..."], format: Minifloat) -> UInt16[Array, "..."]:
    """Return the codes of fp32 numbers. NaN becomes 0."""
    size = jnp.clip(jnp.abs(jnp.where(jnp.isnan(x), 0, x)), 0, format.largest)
    exponent = jnp.maximum(exponent_of(size), format.min_exponent)
    # up to 2^(m + 1), which is the next exponent
    mantissa = jnp.round(size * power_of_two(format.mantissa - exponent)).astype(jnp.int32)
    code = ((exponent - format.min_exponent) << format.mantissa) + mantissa
    negative = (lax.bitcast_convert_type(x, jnp.int32) < 0) & (size > 0)
    return (code | (negative.astype(jnp.int32) << (format.bits - 1))).astype(jnp.uint16)


def decode(codes: UInt16[Array, "..."], format: Minifloat) -> Float[Array, "..."]:
    """Return the fp32 numbers that codes stand for. Exact."""
    last = format.bits - 1
    size = (codes & np.uint16(2**last - 1)) << np.uint16(10 - format.mantissa)
    sign = (codes >> np.uint16(last)) << np.uint16(15)
    half = lax.bitcast_convert_type(size | sign, jnp.float16)
    return half.astype(jnp.float32) * 2.0 ** (15 - format.bias)


def exponent_of(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return floor(log2 x) of positive normal fp32 numbers, -127 for 0 and subnormal ones."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def power_of_two(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return 2^exponent, fp32, for exponents of normal numbers, -126 to 127.

    Exact, unlike `jnp.exp2`, which is inexact on some backends.
    """
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
