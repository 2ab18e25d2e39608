"""The non-uniformly quantized array: packed codes that index a codebook, a scale and a zero point,
perhaps sparse outliers.

    x[b, k, t, h]  ~  levels[code[b, k, t, h]] * scale + zero

plus a residual if (t, k * H + h) is an outlier.

The levels, the codebook's entries, are sorted and lie in [-1, 1]. Scale and zero point are half a
range and its middle. The range is either that of a channel, fixed and kept by the method (then they
are not part of the array), or that of a group of channels of one token, taken when the token is
quantized. Source: Hooper et al., KVQuant, sections 3.3 and 3.4.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt16

from kvq_jax.arrays import sparse_outliers
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.codebooks import look_up, nearest_codes
from kvq_jax.arrays.packing import Words, pack, unpack
from kvq_jax.arrays.sparse_outliers import Pool, SparseOutliers
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import (
    NEAR,
    OutOfRange,
    as_stored,
    out_of_range,
    saturation_limit,
    stored_scale,
)
from kvq_jax.types.pytree import describe, pytree
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout

Rows = Float[Array, "B K T H"]


@dataclasses.dataclass(frozen=True)
class CodebookFormat:
    """The quantization format of a body. Static and hashable.

    group: the channels of a token that share a stored scale and zero point. None if these belong to
        channels and are not stored.
    pool: the tokens that share slots for outliers, and how many. None if there are no slots.
    scale_dtype: the dtype of scales and zero points. Residuals are float32 if it is float32, else
        float16.
    stores_zero: False if the zero point of groups is 0.
    """

    bits: int
    channels: int
    block: int
    group: ChannelGroup | None
    pool: Pool | None = None
    scale_dtype: str = "float16"
    stores_zero: bool = True

    @property
    def layout(self) -> PlaneLayout:
        return plane_layout(self.bits, self.channels, self.block)

    @property
    def residual_dtype(self) -> str:
        return "float32" if self.scale_dtype == "float32" else "float16"


@pytree
@dataclasses.dataclass(frozen=True)
class CodebookArray:
    """Packed codes with their scales, zero points and outliers.

    words: int16 [B, K, S/n, w] for each plane set.
    scale, zero: [B, K / heads, H / channels, S] of `format.group`, or None without one. zero is
        also None if the format stores none.
    outliers: None without a pool.
    """

    words: Words
    scale: Float[Array, "B groups rest S"] | None
    zero: Float[Array, "B groups rest S"] | None
    outliers: SparseOutliers | None
    format: CodebookFormat = dataclasses.field(metadata={"static": True})

    def out_of_range(self) -> OutOfRange | None:
        """Return which runs of tokens meet an end of the range of what is stored. Of ranges of
        channels, which are not stored, outliers alone are known."""
        if self.scale is None:
            return self.outliers and sparse_outliers.out_of_range(self.outliers)
        largest, dtype = self.scale.astype(jnp.float32), self.format.scale_dtype
        limit = float(jnp.finfo(dtype).max)
        if self.zero is not None:
            largest = largest + jnp.abs(self.zero.astype(jnp.float32))
            limit = saturation_limit(dtype)
        ends = out_of_range(largest, self.scale, limit, 3)
        if self.outliers is None or self.zero is None or self.format.group is None:
            return ends
        # The codes of an outlier say at most `scale` of it.
        wide_scale, wide_zero = map(self.format.group.spread, (self.scale, self.zero))
        reach = jnp.abs(sparse_outliers.add(wide_zero, self.outliers)) + wide_scale
        return ends._replace(large=ends.large | jnp.any(reach >= NEAR * limit, axis=(1, 3)))


def specs(format: CodebookFormat, batch: int, heads: int, tokens: int) -> CodebookArray:
    """Describe the arrays of a body of `tokens` tokens."""
    group = format.group
    scale = group and BodySpec(
        group.axes(batch, heads, tokens, format.channels), format.scale_dtype
    )
    sparse = format.pool and sparse_outliers.specs(
        batch, heads, tokens, format.pool, format.residual_dtype
    )
    words = word_specs(format.layout, batch, heads, tokens)
    return describe(
        CodebookArray,
        words=words,
        scale=scale,
        zero=scale if format.stores_zero else None,
        outliers=sparse,
        format=format,
    )


def quantize(
    rows: Rows,
    format: CodebookFormat,
    levels: Float[Array, " entries"],
    values: Float[Array, " entries"],
    scale: Float[Array, "..."],
    zero: Float[Array, "..."] | None,
    exact: Bool[Array, "B K T H"] | None = None,
) -> CodebookArray:
    """Quantize finite rows, each entry to the nearest of `levels` to (x - zero) / scale.

    Args:
        rows: [B, K, T, H], finite.
        format: the quantization format.
        levels: the codebook in which the nearest entry is looked up.
        values: the codebook that codes are read with, entry by entry the same as `levels`.
        scale: as stored if the format stores it, else any shape that broadcasts against the rows.
        zero: likewise. None if the format has groups but stores no zero point.
        exact: marks the outliers that get a slot. Their residuals are taken against the dequantized
            codes, so the rounding of a residual is the only error left.
    """
    group = format.group

    def wide(statistic: Array | None) -> Array:
        if statistic is None:
            return jnp.zeros((1, 1, 1, 1), jnp.float32)
        return statistic.astype(jnp.float32) if group is None else group.spread(statistic)

    wide_scale, wide_zero = wide(scale), wide(zero)
    codes = nearest_codes((rows - wide_zero) / jnp.where(wide_scale == 0, 1, wide_scale), levels)
    sparse = None
    if format.pool:
        assert exact is not None, "a format with slots needs the mask of the outliers"
        dense = look_up(values, codes) * wide_scale + wide_zero
        sparse = sparse_outliers.collect(rows - dense, exact, format.pool, format.residual_dtype)
    words = pack(codes, format.layout)
    return CodebookArray(words, *((None, None) if group is None else (scale, zero)), sparse, format)


def codes(body: CodebookArray) -> UInt16[Array, "B K T H"]:
    return unpack(body.words, body.format.layout)


def dequantize(
    body: CodebookArray,
    values: Float[Array, " entries"],
    scale: Array | None = None,
    zero: Array | None = None,
) -> Rows:
    """Return fp32 rows [B, K, T, H]. scale and zero are needed only if the format does not store
    them. They broadcast against the rows."""
    group = body.format.group
    if group is not None:
        assert body.scale is not None, "the format stores scales"
        scale = group.spread(body.scale)
        zero = (
            jnp.zeros((1, 1, 1, 1), jnp.float32) if body.zero is None else group.spread(body.zero)
        )
    assert scale is not None, "a format of channels needs their scales"
    assert zero is not None, "a format of channels needs their zero points"
    dense = look_up(values, codes(body)) * scale + zero
    return dense if body.outliers is None else sparse_outliers.add(dense, body.outliers)


def half_range(low: Array, high: Array, dtype: str) -> tuple[Array, Array]:
    """Return (scale, zero) = ((high - low) / 2, (high + low) / 2), rounded to the stored dtype."""
    limit = saturation_limit(dtype)
    low, high = (jnp.clip(bound, -limit, limit) for bound in (low, high))
    return stored_scale((high - low) / 2, dtype, 2), as_stored((high + low) / 2, dtype)
