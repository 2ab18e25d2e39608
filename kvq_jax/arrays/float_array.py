"""The array of small floats: packed codes, with an optional scale for each block of neighbouring
channels of a token.

    x[b, k, t, h]  ~  number(code[b, k, t, h]) * scale[block]

The scale is a power of two (E8M0: the MX formats) or an E4M3 number (NVFP4), in 8 bits, and codes
are computed against it as stored. Source: Open Compute Project, Microscaling Formats (MX)
specification 1.0, sections 5.2, 5.4 and 6.3; NVIDIA, Introducing NVFP4 (2025).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.minifloats import E4M3, Minifloat, decode, encode, exponent_of, power_of_two
from kvq_jax.arrays.packing import Words, pack, unpack
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import OutOfRange
from kvq_jax.types.pytree import describe, pytree
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout

ScaleKind = Literal["none", "e8m0", "e4m3"]
E8M0_BIAS = 127
# Larger entries saturate, so that quotients and products stay finite in any order: XLA multiplies a
# scale by the constant in `minifloats.decode` first.
MAX_INPUT = 2.0**100


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """The format of a body. Static and hashable.

    scale: the kind of scale that `group` channels of a token share.
    """

    element: Minifloat
    channels: int
    block: int
    scale: ScaleKind = "none"
    group: int = 0

    @property
    def layout(self) -> PlaneLayout:
        return plane_layout(self.element.bits, self.channels, self.block)

    @property
    def channel_group(self) -> ChannelGroup:
        return ChannelGroup(1, self.group)

    @property
    def largest(self) -> float:
        """Return the largest number that `quantize` writes."""
        largest_scale = {"none": 1.0, "e8m0": 2.0**E8M0_BIAS, "e4m3": E4M3.largest}[self.scale]
        return min(self.element.largest * largest_scale, MAX_INPUT)


@pytree
@dataclasses.dataclass(frozen=True)
class FloatArray:
    """Packed codes with the scales of their blocks.

    words: int16 [B, K, S/n, w] for each plane set.
    scale: [B, K, H/group, S], the bits of E8M0 or E4M3 numbers, or None.
    """

    words: Words
    scale: UInt8[Array, "B K groups S"] | None
    format: FloatFormat = dataclasses.field(metadata={"static": True})

    def out_of_range(self) -> OutOfRange:
        """Return the tokens with an entry of the largest number, which stands for larger ones
        too."""
        large = jnp.any(jnp.abs(dequantize(self)) >= self.format.largest, axis=(1, 3))
        return OutOfRange(large, jnp.zeros_like(large))


def specs(format: FloatFormat, batch: int, heads: int, tokens: int) -> FloatArray:
    """Describe the arrays of a body of `tokens` tokens."""
    scale = None
    if format.scale != "none":
        scale = BodySpec(format.channel_group.axes(batch, heads, tokens, format.channels), "uint8")
    return describe(
        FloatArray,
        words=word_specs(format.layout, batch, heads, tokens),
        scale=scale,
        format=format,
    )


def quantize(rows: Float[Array, "B K T H"], format: FloatFormat) -> FloatArray:
    """Quantize rows. Infinities count as the largest input, NaN as 0."""
    x = jnp.clip(jnp.where(jnp.isnan(rows), 0, rows).astype(jnp.float32), -MAX_INPUT, MAX_INPUT)
    if format.scale == "none":
        return FloatArray(pack(encode(x, format.element), format.layout), None, format)
    group = format.channel_group
    largest = group.stored(jnp.max(jnp.abs(group.cut(x)), ChannelGroup.AXES, keepdims=True))
    if format.scale == "e8m0":
        scale = shared_exponent(largest, format.element)
    else:
        scale = encode(largest / format.element.largest, E4M3)
    bits = scale.astype(jnp.uint8)
    step = group.spread(scale_values(bits, format.scale))
    codes = encode(x / jnp.where(step == 0, 1, step), format.element)
    return FloatArray(pack(codes, format.layout), bits, format)


def dequantize(body: FloatArray) -> Float[Array, "B K T H"]:
    """Return fp32 rows. Exact."""
    format = body.format
    numbers = decode(unpack(body.words, format.layout), format.element)
    if body.scale is None:
        return numbers
    return numbers * format.channel_group.spread(scale_values(body.scale, format.scale))


def shared_exponent(largest: Float[Array, "..."], element: Minifloat) -> Array:
    """Return E8M0 codes of 2^(floor(log2 largest) - floor(log2 of the largest element)), the rule
    of the MX specification.

    The code of 2^-127 is not used: its number is subnormal in fp32, and some backends flush
    subnormal numbers to zero.
    """
    exponent = exponent_of(largest) - exponent_of(jnp.asarray(element.largest, jnp.float32))
    return jnp.clip(exponent + E8M0_BIAS, 1, 2 * E8M0_BIAS)


def scale_values(bits: UInt8[Array, "..."], kind: ScaleKind) -> Float[Array, "..."]:
    """Return the scales that stored bits stand for, fp32."""
    if kind == "e4m3":
        return decode(bits.astype(jnp.uint16), E4M3)
    # An empty body holds zeros.
    return power_of_two(jnp.maximum(bits.astype(jnp.int32), 1) - E8M0_BIAS)
