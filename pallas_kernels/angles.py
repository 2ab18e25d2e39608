"""Cosines and sines of position times frequency, exact to fp32 at every position.

The fp32 product has a relative error of up to 2^-24, which is half a radian at position 10 million.
So angles are counted in units of 2^-32 turn, as 32-bit integers, which wrap around after a whole
turn:

    p w / 2 pi  =  p (whole + rest) 2^-32,    whole an integer,    |rest| <= 1/2

p * whole is an exact product of integers modulo 2^32. p * rest is computed in fp32 and is off by
less than two units for |p| up to 2^24. The compiler can only contract or reorder integers and fp32
products that are exact.

Kernels compute the same from `units_per_position`, which XLA computes once for all layers of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class Units(NamedTuple):
    """The angle that one position adds: whole + rest, |rest| <= 1/2, in units of 2^-32 turn."""

    whole: Int[Array, " half"]
    rest: Float[Array, " half"]


def cos_and_sin(
    positions: Int[Array, "*batch"], frequencies: Float[Array, " half"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Return (cos(p w), sin(p w)) in fp32.

    Absolute error against float64: at most 2e-7 for |p| up to 2^24, and 1e-6 for every int32. On a
    CPU, XLA calls the C library for each cosine and each sine, which takes 11 ns for both. This is
    one vectorized loop, 1 ns for both. Source: the polynomials of Cephes on +- pi / 4.

    Args:
        positions: p, any int32.
        frequencies: w, in radians per token, below pi.
    """
    return at_positions(positions, units_per_position(frequencies))


def at_positions(
    positions: Int[Array, "*batch"], units: Units
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Return the result of `cos_and_sin` from the units of its frequencies, using only operations
    that kernels have.
    """
    whole, rest = (part.reshape((1,) * positions.ndim + part.shape) for part in units)
    return by_elements(positions[..., None].astype(jnp.int32), whole, rest)


def by_elements(
    p: Int[Array, "..."], whole: Int[Array, "..."], rest: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return the result of `at_positions` for positions and units that broadcast against each
    other."""
    # The conversion truncates: kernels cannot round.
    angle = p * whole + (p.astype(jnp.float32) * rest).astype(jnp.int32)
    # the nearest quarter turn, of which the two lowest bits count
    quarter = (angle + (1 << 29)) >> 30
    x = (angle - (quarter << 30)).astype(jnp.float32) * (2 * math.pi / 2**32)
    square = x * x
    sine = x + x * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
    )
    cosine = (
        1
        - 0.5 * square
        + square * square * (4.166664568e-2 + square * (-1.388731625e-3 + square * 2.443315712e-5))
    )
    odd = (quarter & 1) == 1
    cos, sin = jnp.where(odd, sine, cosine), jnp.where(odd, cosine, sine)
    return jnp.where(((quarter + 1) & 2) == 2, -cos, cos), jnp.where((quarter & 2) == 2, -sin, sin)


def units_per_position(frequencies: Float[Array, " half"]) -> Units:
    """Return w 2^32 / 2 pi, for fp32 frequencies w below pi radians per token.

    Both factors are cut into parts of 12 bits, so the product of any two parts is exact in fp32,
    and so are its nearest integer and the rest.
    """
    frequencies = frequencies.astype(jnp.float32)
    upper = lax.bitcast_convert_type(
        lax.bitcast_convert_type(frequencies, jnp.uint32) & jnp.uint32(0xFFFFF000), jnp.float32
    )
    parts = jnp.stack([upper, frequencies - upper])

    def add(i: Int[Array, ""] | int, units: tuple[Array, Array]) -> tuple[Array, Array]:
        whole, rest = units
        for unit in UNITS:
            product = parts[i] * unit
            nearest = jnp.round(product)
            whole, rest = whole + nearest.astype(jnp.int32), rest + (product - nearest)
        carried = jnp.round(rest)
        return whole + carried.astype(jnp.int32), rest - carried

    def looped(zeros: tuple[Array, Array]) -> tuple[Array, Array]:
        return lax.fori_loop(0, 2, add, zeros)

    # XLA's CPU backend would fuse all of this into the loop over positions, but it fuses nothing
    # into another loop.
    zeros = jnp.zeros(frequencies.shape, jnp.int32), jnp.zeros(frequencies.shape, jnp.float32)
    return Units(
        *lax.platform_dependent(zeros, cpu=looped, default=lambda zeros: add(1, add(0, zeros)))
    )


def _in_parts(value: float, bits: int, count: int) -> Iterator[float]:
    """Yield `count` numbers of `bits` bits each whose sum is close to a value."""
    for _ in range(count):
        unit = 2.0 ** (math.frexp(value)[1] - bits)
        part = math.floor(value / unit) * unit
        yield part
        value -= part


UNITS = tuple(_in_parts(2**32 / (2 * math.pi), 12, 5))
