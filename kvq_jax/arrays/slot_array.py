"""The hybrid array as InnerQ's paper stores it, with a 32-bit slot for the signs or the zero point
of each group.

    x[b, k, t, h]  ~  +-code * scale            in a symmetric group
    x[b, k, t, h]  ~    code * scale + zero     in an asymmetric group

The slot of a symmetric group holds the sign of element i in bit i. The slot of an asymmetric one
holds its zero point, fp32. Codes have `format.bits` bits in both, the mode is one bit for each
group, and a group has at most 32 elements. So a group of 32 takes bits + 1 + 16 / 32 + 1 / 32 bits
for each element: 3.53 with 2 bits and 16-bit scales. `grouped_array`, which stores signs and a zero
point apart, takes 4. Source: Tayaranian et al., InnerQ, section 4.1.2.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8

from kvq_jax.arrays import uniform
from kvq_jax.arrays.grouped_array import GroupFormat, Scheme, grouped_axes, repeated, split, stored
from kvq_jax.arrays.packing import Words, pack, unpack
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import Axes
from kvq_jax.types.array_types import Axis
from kvq_jax.types.pytree import describe, pytree
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout

SLOT_BITS = 32
MODE_BITS = 8  # of the bytes that hold the modes of neighbouring groups


@pytree
@dataclasses.dataclass(frozen=True)
class SlotArray:
    """x ~ +-code * scale, or code * scale + zero, group by group.

    words: int16 [B, K, S/n, w] for each plane set of `layout(format)`.
    scale, slot: [B, K, H/group, S] if grouped over channels, [B, K, S/group, H] if grouped over
        tokens.
    mode: the same with up to 8 neighbours of the last axis in a byte, the first in its lowest bit,
        1 for symmetric.
    format: a hybrid format.
    """

    words: Words
    scale: Float[Array, "B K groups rest"]
    slot: Int32[Array, "B K groups rest"]
    mode: UInt8[Array, "B K groups bytes"]
    format: GroupFormat = dataclasses.field(metadata={"static": True})

    def out_of_range(self) -> uniform.OutOfRange:
        """Return which runs of tokens meet an end of the range of what is stored."""
        reach = ((1 << self.format.bits) - 1) * self.scale.astype(jnp.float32)
        symmetric = _modes(self.mode, modes_together(self.format))
        zero = jnp.where(symmetric, 0, lax.bitcast_convert_type(self.slot, jnp.float32))
        return uniform.out_of_range(
            jnp.maximum(jnp.abs(zero), jnp.abs(zero + reach)),
            self.scale,
            uniform.saturation_limit(self.format.scale_dtype),
            self.format.scale_token_axis,
        )


def layout(format: GroupFormat) -> PlaneLayout:
    """Return the layout of the codes, which hold no signs."""
    return plane_layout(format.bits, format.channels, format.block)


def modes_together(format: GroupFormat) -> int:
    """Return the number of modes in a byte: 8, or fewer if the modes of a block, or of a row's
    channels, would not fill whole bytes."""
    return math.gcd(MODE_BITS, format.block if format.axis == "channels" else format.channels)


def specs(format: GroupFormat, batch: int, heads: int, tokens: int) -> SlotArray:
    """Describe the arrays of a body of `tokens` tokens."""
    *first, last = grouped_axes(format, batch, heads, tokens)
    return describe(
        SlotArray,
        words=word_specs(layout(format), batch, heads, tokens),
        scale=BodySpec((*first, last), format.scale_dtype),
        slot=BodySpec((*first, last), "int32"),
        mode=BodySpec((*first, Axis(last.name, last.count, per=modes_together(format))), "uint8"),
        format=format,
    )


def quantize(
    rows: Float[Array, "B K T H"], format: GroupFormat, scheme: Scheme | None = None
) -> SlotArray:
    """Quantize rows [B, K, T, H].

    Args:
        rows: [B, K, T, H], T a multiple of the block.
        format: a hybrid format.
        scheme: "sym" makes all groups symmetric, whatever their errors.
    """
    grouped, axis = split(rows, format)
    hybrid = uniform.hybrid_modes(
        grouped, format.bits, axis, jnp.dtype(format.scale_dtype), jnp.float32
    )
    symmetric = hybrid.symmetric | (scheme == "sym")
    signed = hybrid.sym.codes.astype(jnp.int32) - format.centre
    codes = jnp.where(symmetric, jnp.abs(signed), hybrid.asym.codes.astype(jnp.int32))
    scale = jnp.where(symmetric, hybrid.sym.scale, hybrid.asym.scale)
    assert hybrid.asym.zero is not None
    zero = lax.bitcast_convert_type(hybrid.asym.zero, jnp.int32)
    slot = jnp.where(symmetric, _signs(signed < 0, axis), zero)
    return SlotArray(
        pack(codes.reshape(rows.shape), layout(format)),
        stored(scale, format),
        stored(slot, format),
        _packed_modes(stored(symmetric, format), modes_together(format)),
        format,
    )


def dequantize(body: SlotArray) -> Float[Array, "B K T H"]:
    """Return the rows that the codes stand for, fp32 [B, K, T, H]."""
    format = body.format
    codes = unpack(body.words, layout(format)).astype(jnp.float32)
    symmetric = _modes(body.mode, modes_together(format))
    zero = jnp.where(symmetric, 0, lax.bitcast_convert_type(body.slot, jnp.float32))
    signs = repeated(jnp.where(symmetric, body.slot, 0), format)
    element_axis = 3 if format.axis == "channels" else 2
    place = lax.broadcasted_iota(jnp.int32, codes.shape, element_axis) % format.group_size
    negative = (signs >> place) & 1
    scale = repeated(body.scale.astype(jnp.float32), format)
    return codes * jnp.where(negative == 1, -scale, scale) + repeated(zero, format)


def _signs(negative: Bool[Array, "..."], axis: Axes) -> Int32[Array, "..."]:
    """Return one word for each group. Its bit i is 1 if element i is negative."""
    place = lax.broadcasted_iota(
        jnp.uint32, negative.shape, axis if isinstance(axis, int) else axis[-1]
    )
    words = jnp.sum(negative.astype(jnp.uint32) << place, axis, dtype=jnp.uint32, keepdims=True)
    return lax.bitcast_convert_type(words, jnp.int32)


def _packed_modes(
    symmetric: Bool[Array, "B K groups rest"], together: int
) -> UInt8[Array, "B K groups bytes"]:
    *first, last = symmetric.shape
    bits = symmetric.reshape(*first, last // together, together).astype(jnp.uint8)
    return jnp.sum(bits << _places(bits, together), axis=-1, dtype=jnp.uint8)


def _modes(
    packed: UInt8[Array, "B K groups bytes"], together: int
) -> Bool[Array, "B K groups rest"]:
    spread = jnp.repeat(packed, together, axis=-1)
    return ((spread >> _places(spread, together)) & 1) == 1


def _places(modes: UInt8[Array, "..."], together: int) -> UInt8[Array, "..."]:
    """Return the place within its byte of each entry of the last axis."""
    index = lax.broadcasted_iota(jnp.int32, modes.shape, modes.ndim - 1)
    return (index % together).astype(jnp.uint8)
