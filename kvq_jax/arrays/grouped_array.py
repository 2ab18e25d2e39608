"""The uniformly quantized array: packed codes with one scale (and zero point) for each group.

    x[b, k, t, h]  ~  code[b, k, t, h] * scale[group] + zero[group]

A group is `group_size` neighbouring channels of one token (grouped over "channels": InnerQ keys,
KIVI values) or `group_size` neighbouring tokens of one channel (grouped over "tokens": KIVI keys,
InnerQ values).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt16

from kvq_jax.arrays import uniform
from kvq_jax.arrays.channel_groups import ChannelGroup, divisors
from kvq_jax.arrays.packing import Words, pack, unpack
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import Axes
from kvq_jax.types.array_types import Axis
from kvq_jax.types.pytree import describe, pytree
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout

GroupedAxis = Literal["channels", "tokens"]
Scheme = Literal["asym", "sym", "hybrid"]
TOKEN_AXIS = 3  # of the tokens of one group, in rows that are split over tokens


@dataclasses.dataclass(frozen=True)
class GroupFormat:
    """The quantization format of a body. Static and hashable.

    bits: as the scheme's paper counts them. Symmetric and hybrid codes take one more (the sign),
        which `code_bits` includes.
    scale_dtype: the dtype of scales and zero points.
    heads: the number of heads that a group spans: 1, or more if it runs over channels and takes all
        H of each head.
    """

    bits: int
    scheme: Scheme
    axis: GroupedAxis
    group_size: int
    channels: int
    block: int
    scale_dtype: str = "float16"
    heads: int = 1

    @property
    def channel_group(self) -> ChannelGroup:
        return ChannelGroup(self.heads, self.group_size)

    @property
    def code_bits(self) -> int:
        return self.bits + (self.scheme != "asym")

    @property
    def stores_zero(self) -> bool:
        return self.scheme != "sym"

    @property
    def layout(self) -> PlaneLayout:
        return plane_layout(self.code_bits, self.channels, self.block)

    @property
    def centre(self) -> int:
        """Return the code that stands for 0 in the symmetric scheme: zero = -centre * scale."""
        return 2**self.bits - 1

    @property
    def scale_token_axis(self) -> int:
        """Return the axis of scales that counts tokens, or groups of them."""
        return 3 if self.axis == "channels" else 2


@pytree
@dataclasses.dataclass(frozen=True)
class GroupedArray:
    """x ~ code * scale + zero.

    words: int16 [B, K, S/n, w] for each plane set of `format.layout`.
    scale, zero: [B, K/heads, H/group, S] if grouped over channels, [B, K, S/group, H] if grouped
        over tokens. zero is None in the symmetric scheme: it is -(2^bits - 1) * scale.
    """

    words: Words
    scale: Float[Array, "B K groups rest"]
    zero: Float[Array, "B K groups rest"] | None
    format: GroupFormat = dataclasses.field(metadata={"static": True})

    def out_of_range(self) -> uniform.OutOfRange:
        """Return which runs of tokens meet an end of the range of what is stored."""
        low = zeros(self)
        high = low + self.format.centre * self.scale.astype(jnp.float32)  # of 2^bits - 1 steps
        return uniform.out_of_range(
            jnp.maximum(jnp.abs(low), jnp.abs(high)),
            self.scale,
            uniform.saturation_limit(self.format.scale_dtype),
            self.format.scale_token_axis,
        )


def grouped_axes(format: GroupFormat, batch: int, heads: int, tokens: int) -> tuple[Axis, ...]:
    """Return the axes of statistics with one entry for each group of a body of `tokens` tokens."""
    if format.axis == "channels":
        return format.channel_group.axes(batch, heads, tokens, format.channels)
    groups = Axis("tokens", tokens, per=format.group_size)
    return Axis("batch", batch), Axis("kv_heads", heads), groups, Axis("channels", format.channels)


def specs(format: GroupFormat, batch: int, heads: int, tokens: int) -> GroupedArray:
    """Describe the arrays of a body of `tokens` tokens."""
    scale = BodySpec(grouped_axes(format, batch, heads, tokens), format.scale_dtype)
    words = word_specs(format.layout, batch, heads, tokens)
    return describe(
        GroupedArray,
        words=words,
        scale=scale,
        zero=scale if format.stores_zero else None,
        format=format,
    )


def quantize(
    rows: Float[Array, "B K T H"], format: GroupFormat, scheme: Scheme | None = None
) -> GroupedArray:
    """Quantize rows [B, K, T, H].

    Args:
        rows: [B, K, T, H], T a multiple of the block.
        format: the quantization format.
        scheme: the scheme of these rows if it is not the format's. A hybrid body also takes
            symmetric groups.
    """
    grouped, axis = split(rows, format)
    quantizer = {"asym": uniform.asymmetric, "sym": uniform.symmetric, "hybrid": uniform.hybrid}[
        scheme or format.scheme
    ]
    group = quantizer(grouped, format.bits, axis, jnp.dtype(format.scale_dtype))
    if format.stores_zero and group.zero is None:
        group = uniform.with_stored_zero(group, format.bits)
    zero = None if group.zero is None else stored(group.zero, format)
    return GroupedArray(
        pack(group.codes.reshape(rows.shape), format.layout),
        stored(group.scale, format),
        zero,
        format,
    )


def split(rows: Float[Array, "B K T H"], format: GroupFormat) -> tuple[Array, Axes]:
    """Return the rows with separate axes for the elements of a group, and these axes."""
    if format.axis == "channels":
        return format.channel_group.cut(rows), ChannelGroup.AXES
    b, k, t, h = rows.shape
    return rows.reshape(b, k, t // format.group_size, format.group_size, h), TOKEN_AXIS


def stored(statistic: Array, format: GroupFormat) -> Array:
    """Lay out a statistic that was reduced over the axes of `split` (kept with size 1) as it is
    stored."""
    if format.axis == "channels":
        return format.channel_group.stored(statistic)
    return jnp.squeeze(statistic, TOKEN_AXIS)


def codes(body: GroupedArray) -> UInt16[Array, "B K T H"]:
    """Return the unsigned codes [B, K, T, H], the sign included if there is one."""
    return unpack(body.words, body.format.layout)


def per_element(
    statistic: Float[Array, "B heads groups rest"], format: GroupFormat
) -> Float[Array, "B K T H"]:
    """Repeat a stored scale or zero point, in fp32, to one entry for each element."""
    return repeated(statistic.astype(jnp.float32), format)


def repeated(
    statistic: Shaped[Array, "B heads groups rest"], format: GroupFormat
) -> Shaped[Array, "B K T H"]:
    """Repeat a statistic of each group to one entry for each element."""
    if format.axis == "channels":
        return format.channel_group.repeated(statistic)
    return jnp.repeat(statistic, format.group_size, axis=2)


def zeros(body: GroupedArray) -> Float[Array, "B K groups rest"]:
    """Return the zero point of each group in fp32, stored or implied."""
    if body.zero is not None:
        return body.zero.astype(jnp.float32)
    return -body.format.centre * body.scale.astype(jnp.float32)


def dequantize(body: GroupedArray) -> Float[Array, "B K T H"]:
    """Return code * scale + zero, fp32 [B, K, T, H], to fp32 rounding."""
    scale = per_element(body.scale, body.format)
    return codes(body).astype(jnp.float32) * scale + per_element(zeros(body), body.format)


def resolve_group(requested: int, size: int, extent: str, largest: int = 32) -> int:
    """Return the group size for an axis of `size` entries.

    It is `requested`, or for 0 the largest divisor up to `largest`. Raises ValueError, listing the
    divisors, if `requested` is none of them.
    """
    if requested == 0:
        return divisors(size, largest)[-1]
    if size % requested:
        raise ValueError(
            f"group_size={requested} does not divide {extent} ({size}); divisors:"
            f" {', '.join(map(str, divisors(size)))}"
        )
    return requested
