"""Uniform quantizers of one group: asymmetric, symmetric, and InnerQ's hybrid of both.

All three return unsigned codes u with  x ~ u * scale + zero,  so one rule reads every cache:

    asymmetric(b)   zero = min,  scale = (max - min) / (2^b - 1),  u in 0 .. 2^b - 1
                    (KIVI, section 3)
    symmetric(b)    m = 2^b - 1,  scale = max|x| / m,  zero = -m * scale (implied),
                    u in 0 .. 2m: b bits and a sign  (InnerQ, 4.1.1)
    hybrid(b)       for each group the one of the two with the smaller L1 error, asymmetric on a tie
                    (InnerQ, 4.1.2)

Ranges are taken over the finite entries. +-inf is quantized as the group's finite extreme, and nan
as its level nearest zero. Rounding is half to even.

Codes are computed against the scale and zero point *as stored*. Rounding these to 16 bits moves the
range. An entry inside the stored range is off by at most half a step, and one left outside by as
far as the ends moved,

    |x^ - x| <= max(scale / 2, (ulp(zero) + top * ulp(scale)) / 2)

with ulp the spacing of the stored dtype there, and top the largest code. So a group far from zero
can cost more than its steps: around 100, half an ulp of a float16 zero point is 0.03, and a
constant group dequantizes to its value rounded to the stored dtype (100.03 to 100.0). An implied
zero point adds no ulp. One that is written out for a symmetric group of a hybrid body adds half of
one. Entries beyond half the stored dtype's range (32720 for float16) saturate there first. Below
float16's normal numbers (6.1e-5) a scale is rounded up, to 6e-8 at least, so that a group of small
entries is off by at most that, and never decodes to its minimum alone.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels.stored_scales import raised_scale, saturation_limit

NEAR = 1 - 2.0**-9  # of the limit: scales and zero points are rounded
Axes: TypeAlias = int | tuple[int, ...]


class GroupCodes(NamedTuple):
    """Codes of groups along some axes.

    scale, zero: they have size 1 along these axes. `zero` is None for symmetric groups: it is
        -(2^b - 1) * scale.
    """

    codes: UInt8[Array, "..."]
    scale: Float[Array, "..."]
    zero: Float[Array, "..."] | None


def finite_range(x: Float[Array, "..."], axis: Axes, limit: float) -> tuple[Array, Array, Array]:
    """Return (x without non-finite entries, minimum, maximum) over the finite entries of each
    group. A group with none counts as zeros."""
    finite = jnp.isfinite(x)
    x = jnp.clip(x, -limit, limit)
    low = jnp.min(jnp.where(finite, x, jnp.inf), axis, keepdims=True)
    high = jnp.max(jnp.where(finite, x, -jnp.inf), axis, keepdims=True)
    low, high = (jnp.where(jnp.isfinite(bound), bound, 0) for bound in (low, high))
    return jnp.clip(jnp.where(jnp.isnan(x), 0, x), low, high), low, high


def _levels(x: Array, scale: Array, zero: Array, top: int) -> Array:
    safe = jnp.where(scale == 0, 1, scale).astype(jnp.float32)
    return jnp.round(jnp.clip((x - zero.astype(jnp.float32)) / safe, 0, top))


def _code_dtype(top: int) -> DTypeLike:
    return jnp.uint8 if top < 256 else jnp.uint16


def as_stored(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Round fp32 numbers to the dtype in which they are stored, to nearest even.

    A conversion alone is not enough: for GPUs XLA drops one that is undone in the same program
    (`xla_allow_excess_precision`), and codes would be those of a scale that is not stored.
    """
    known = jnp.finfo(dtype)
    if known.bits >= 32:
        return x.astype(dtype)
    rounded = lax.reduce_precision(x, known.nexp, known.nmant)
    if jnp.dtype(dtype) == jnp.float16:
        # `reduce_precision` makes 0 of what lies below the normal numbers.
        small = jnp.round(x * 2.0**24) * 2.0**-24
        rounded = jnp.where(jnp.abs(x) < 2.0**-14, small, rounded)
    return rounded.astype(dtype)


def stored_scale(scale: Float[Array, "..."], dtype: DTypeLike, steps: int) -> Float[Array, "..."]:
    """Round as pallas_kernels.stored_scales.stored_scale does, for scales that are read again."""
    return as_stored(raised_scale(scale, dtype, steps), dtype)


class OutOfRange(NamedTuple):
    """The ends of the range of what is stored that each of n runs of S / n neighbouring tokens
    meets.

    large: an entry of the run saturated, or came near to it.
    small: all entries of the run lie below the normal numbers of the scale's dtype, and are read
        from scales of its least one.
    """

    large: Bool[Array, "B n"]
    small: Bool[Array, "B n"]


def out_of_range(
    largest: Float[Array, "B ..."], scale: Float[Array, "B ..."], limit: float, token_axis: int
) -> OutOfRange:
    """Return which runs of tokens meet an end.

    Args:
        largest: the largest magnitude that each group can be read as.
        scale: its scale, as stored.
        limit: the magnitude at which entries saturate.
        token_axis: the axis of runs of tokens.
    """
    others = tuple(i for i in range(1, scale.ndim) if i != token_axis)
    minimum = 2.0**-24 if scale.dtype == jnp.float16 else 0.0
    wide = scale.astype(jnp.float32)
    tiny = (wide <= minimum) & (largest < float(jnp.finfo(scale.dtype).tiny))
    return OutOfRange(
        jnp.any(largest >= NEAR * limit, axis=others),
        jnp.all(tiny, axis=others) & jnp.any(wide > 0, axis=others),
    )


def finite_rows(rows: Float[Array, "... H"], limit: float) -> Float[Array, "... H"]:
    """Return rows in fp32 whose degenerate entries stay in their token.

    NaN counts as 0, infinities count as the largest finite magnitude of their row, and all entries
    saturate at `limit`.
    """
    x = rows.astype(jnp.float32)
    finite = jnp.where(jnp.isfinite(x), x, 0)
    largest = jnp.max(jnp.abs(finite), axis=-1, keepdims=True)
    x = jnp.where(jnp.isinf(x), jnp.sign(x) * largest, finite)
    return jnp.clip(x, -limit, limit)


def asymmetric(
    x: Float[Array, "..."],
    bits: int,
    axis: Axes,
    dtype: DTypeLike = jnp.float32,
    zero_dtype: DTypeLike | None = None,
) -> GroupCodes:
    """Quantize x asymmetrically, in fp32, in groups along `axis`.

    Args:
        x: the rows.
        bits: bits of a code.
        axis: the axes that a group spans.
        dtype: the dtype of stored scales.
        zero_dtype: the dtype of stored zero points, by default `dtype`.
    """
    top = 2**bits - 1
    x, low, high = finite_range(x.astype(jnp.float32), axis, saturation_limit(dtype))
    scale = stored_scale((high - low) / top, dtype, top)
    zero = as_stored(low, dtype if zero_dtype is None else zero_dtype)
    return GroupCodes(_levels(x, scale, zero, top).astype(_code_dtype(top)), scale, zero)


def symmetric(
    x: Float[Array, "..."], bits: int, axis: Axes, dtype: DTypeLike = jnp.float32
) -> GroupCodes:
    """Quantize x symmetrically, in fp32, to b-bit magnitudes with a sign.

    Codes are offset binary, 0 .. 2 * (2^b - 1).
    """
    reach = 2**bits - 1
    x, low, high = finite_range(x.astype(jnp.float32), axis, saturation_limit(dtype))
    scale = stored_scale(jnp.maximum(-low, high) / reach, dtype, reach)
    codes = _levels(x, scale, -reach * scale.astype(jnp.float32), 2 * reach)
    # A group of zeros has scale 0. Any code dequantizes to 0, and the middle one is canonical.
    codes = jnp.where(scale == 0, reach, codes)
    return GroupCodes(codes.astype(_code_dtype(2 * reach)), scale, None)


def hybrid(
    x: Float[Array, "..."], bits: int, axis: Axes, dtype: DTypeLike = jnp.float32
) -> GroupCodes:
    """Quantize each group by symmetric(b) or asymmetric(b), whichever has the smaller L1 error.

    A symmetric group stores zero = -m * scale, so that one rule dequantizes both.
    """
    both = hybrid_modes(x, bits, axis, dtype, dtype)
    widened = both.asym._replace(codes=both.asym.codes.astype(both.sym.codes.dtype))
    return jax.tree.map(lambda s, a: jnp.where(both.symmetric, s, a), both.sym, widened)


class HybridModes(NamedTuple):
    """Groups quantized in both modes, with the zero point written out.

    symmetric: True if the symmetric mode has the smaller error. A tie is False.
    """

    asym: GroupCodes
    sym: GroupCodes
    symmetric: Bool[Array, "..."]


def hybrid_modes(
    x: Float[Array, "..."], bits: int, axis: Axes, dtype: DTypeLike, zero_dtype: DTypeLike
) -> HybridModes:
    """Quantize each group in both modes. Scales are stored as `dtype`, zero points as
    `zero_dtype`."""
    asym = asymmetric(x, bits, axis, dtype, zero_dtype)
    sym = with_stored_zero(symmetric(x, bits, axis, dtype), bits, zero_dtype)
    clean, _, _ = finite_range(x.astype(jnp.float32), axis, saturation_limit(dtype))
    asym_error, sym_error = (
        jnp.sum(jnp.abs(dequantize(g) - clean), axis, keepdims=True) for g in (asym, sym)
    )
    return HybridModes(asym, sym, asym_error > sym_error)


def with_stored_zero(group: GroupCodes, bits: int, dtype: DTypeLike | None = None) -> GroupCodes:
    """Write out the implied zero point of a symmetric group, rounded once to `dtype`.

    The default dtype is the scale's. In float16 rounding moves it by at most 2^-11 of max|x|.
    """
    exact = -(2**bits - 1) * group.scale.astype(jnp.float32)
    zero = as_stored(exact, group.scale.dtype if dtype is None else dtype)
    return group._replace(zero=zero)


def dequantize(group: GroupCodes) -> Float[Array, "..."]:
    """Return u * scale + zero in fp32, for groups that store their zero point."""
    assert group.zero is not None
    return group.codes.astype(jnp.float32) * group.scale.astype(jnp.float32) + group.zero.astype(
        jnp.float32
    )
