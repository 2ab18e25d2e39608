"""Rotary position embedding on half-split pairs, as a value that cache methods can re-apply.

    y_i       = a * (x_i * cos(p w_i) - x_{i+H/2} * sin(p w_i))
    y_{i+H/2} = a * (x_{i+H/2} * cos(p w_i) + x_i * sin(p w_i))

with p the token's position, w the inverse frequencies [H/2] and a the attention factor (1 except for yarn).
Angles, sines and products are fp32; the result has the dtype of the rows. Source: Su et al., RoFormer, section 3.4.2, in the pairing of
Hugging Face's Llama.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.pytree import pytree


@pytree
@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of one model: inverse_frequencies [H/2] fp32 in radians per token, attention_factor [] fp32."""

    inverse_frequencies: Float[Array, " half"]
    attention_factor: Float[Array, ""]


def rotate(rows: Float[Array, "B K T H"], positions: Int[Array, "#B T"], rope: Rope) -> Float[Array, "B K T H"]:
    """Rotate rows [B, K, T, H] (any head count) to their positions [B, T]."""
    # without the barrier, XLA computes a token's cosines again for each of its heads (docs/decisions.md)
    cos_B1Th, sin_B1Th = (table[:, None] for table in lax.optimization_barrier(cosines_and_sines(positions, rope)))
    first, second = jnp.split(rows.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos_B1Th - second * sin_B1Th, second * cos_B1Th + first * sin_B1Th], axis=-1)
    return rotated.astype(rows.dtype)


def cosines_and_sines(positions: Int[Array, "B T"], rope: Rope) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return (a cos(p w), a sin(p w)) in fp32, from fp32 angles: tables [B, T, H/2] that serve all heads of a token.

    Absolute error at most 2e-7 for angles below 2^20. On a CPU, XLA calls the C library for every cosine and every sine, 11 ns for both;
    this is one vectorized loop, 2 ns for both. Source: Cody and Waite's reduction by multiples of pi / 2, Cephes' polynomials.
    """
    angles = positions[..., None].astype(jnp.float32) * rope.inverse_frequencies[None, None]
    quarters = jnp.round(angles * (2 / math.pi))
    x = angles
    for part in HALF_PI:
        x = x - quarters * part  # exact for all parts but the last: few bits times whole numbers below 2^20
    square = x * x
    sine = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cosine = 1 - 0.5 * square + square * square * (4.166664568e-2 + square * (-1.388731625e-3 + square * 2.443315712e-5))
    turns = quarters.astype(jnp.int32)
    odd = (turns & 1) == 1
    swapped = jnp.where(odd, sine, cosine), jnp.where(odd, cosine, sine)
    negative = ((turns + 1) & 2) == 2, (turns & 2) == 2
    cos, sin = (jnp.where(minus, -value, value) * rope.attention_factor for minus, value in zip(negative, swapped, strict=True))
    return cos, sin


def _in_parts(value: float, bits: int, count: int) -> Iterator[float]:
    """Yield `count` numbers of `bits` bits each that nearly add up to a value, then the remainder."""
    for _ in range(count):
        unit = 2.0 ** (math.frexp(value)[1] - bits)
        part = math.floor(value / unit) * unit
        yield part
        value -= part
    yield value


HALF_PI = tuple(_in_parts(math.pi / 2, 4, 5))
