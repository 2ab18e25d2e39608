"""The polar form of keys: an angle and a radius for each RoPE pair (i, i + H/2), packed into one
code.

    k_i = r cos(theta),  k_{i+H/2} = r sin(theta)
    code = radius code << angle_bits | angle code

    grouped   v ~ (code + 1/2) * step + min, with step = (max - min) / 2^b, for r and for theta of a
              pair and a group of tokens. With radius_scale="sqrt", for sqrt(r) in place of r,
              which gives small radii smaller steps than large ones.
    global    theta ~ code * 2 pi / 2^b - pi,  r ~ code * step of the pair, one for the whole
              sequence

Angles lie on a circle, so the least of a group depends on where the circle is cut open. It is cut
in the largest gap between a group's angles, which makes the range the smallest possible. Source: Wu
et al., PolarQuant, sections 3.1 and 3.2, and its public code.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt16

from kvq_jax.arrays.codebooks import look_up
from kvq_jax.arrays.packing import Words, pack, unpack
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import (
    OutOfRange,
    as_stored,
    out_of_range,
    saturation_limit,
    stored_scale,
)
from kvq_jax.types.array_types import Axis
from kvq_jax.types.pytree import describe, pytree
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout

Grid = Literal["grouped", "global"]
Cut = Literal["gap", "fixed"]
RadiusScale = Literal["linear", "sqrt"]
TURN = 2 * math.pi

Pairs = Float[Array, "B K T half"]
OfGroups = Float[Array, "B K groups half"]


@dataclasses.dataclass(frozen=True)
class PolarFormat:
    """The quantization format of keys. Static and hashable.

    cut: where the circle of a group's angles is opened. "fixed" opens it at the angle 0.
    radius_scale: the quantity that has equal steps within a group.
    """

    angle_bits: int
    radius_bits: int
    channels: int
    block: int
    group_size: int
    grid: Grid = "grouped"
    cut: Cut = "gap"
    scale_dtype: str = "float16"
    radius_scale: RadiusScale = "linear"

    @property
    def half(self) -> int:
        return self.channels // 2

    @property
    def layout(self) -> PlaneLayout:
        return plane_layout(self.angle_bits + self.radius_bits, self.half, self.block)


@pytree
@dataclasses.dataclass(frozen=True)
class PolarArray:
    """Packed codes of keys in polar form, with their scales and zero points.

    words: int16 [B, K, S/n, w] for each plane set, of H/2 codes for each token.
    others: [B, K, S/group, H/2], the step (scale) and the least value (zero) of the radii, or of
        their square roots, and of the angles. None on the global grid.
    """

    words: Words
    radius_scale: OfGroups | None
    radius_zero: OfGroups | None
    angle_scale: OfGroups | None
    angle_zero: OfGroups | None
    format: PolarFormat = dataclasses.field(metadata={"static": True})

    def out_of_range(self) -> OutOfRange | None:
        """Return which runs of tokens meet an end of the range of what is stored, None for the
        global grid, whose steps are statistics."""
        if self.radius_scale is None or self.radius_zero is None:
            return None
        steps = 1 << self.format.radius_bits
        maximum = self.radius_zero.astype(jnp.float32) + steps * self.radius_scale.astype(
            jnp.float32
        )
        limit = saturation_limit(self.format.scale_dtype)
        if self.format.radius_scale == "sqrt":
            limit = math.sqrt(limit)
        return out_of_range(maximum, self.radius_scale, limit, 2)


def specs(format: PolarFormat, batch: int, heads: int, tokens: int) -> PolarArray:
    """Describe the arrays of a body of `tokens` tokens."""
    groups = Axis("tokens", tokens, per=format.group_size)
    of_groups = BodySpec(
        (Axis("batch", batch), Axis("kv_heads", heads), groups, Axis("pairs", format.half)),
        format.scale_dtype,
    )
    words = word_specs(format.layout, batch, heads, tokens)
    names = "radius_scale", "radius_zero", "angle_scale", "angle_zero"
    return describe(
        PolarArray,
        words=words,
        **dict.fromkeys(names, of_groups if format.grid == "grouped" else None),
        format=format,
    )


def to_polar(
    rows: Float[Array, "B K T H"], limit: float
) -> tuple[Pairs, Pairs, Bool[Array, "B K T half"]]:
    """Return the radii, the angles in [-pi, pi), both fp32, and the mask of finite pairs.

    A NaN counts as 0, an infinite entry as one of magnitude `limit`. Radii are bounded by `limit`
    too.
    """
    x, y = jnp.split(rows.astype(jnp.float32), 2, axis=-1)
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    x, y = (jnp.where(jnp.isnan(part), 0, jnp.clip(part, -limit, limit)) for part in (x, y))
    angle = jnp.arctan2(y, x)
    return jnp.minimum(jnp.hypot(x, y), limit), jnp.where(angle >= math.pi, -math.pi, angle), finite


def quantize(
    rows: Float[Array, "B K T H"],
    format: PolarFormat,
    step: Float[Array, "B K 1 half"] | None = None,
) -> PolarArray:
    """Quantize keys after RoPE.

    Args:
        rows: [B, K, T, H], T a multiple of the block.
        format: the quantization format.
        step: the step of the radii, on the global grid only.
    """
    radius, angle, finite = to_polar(rows, saturation_limit(format.scale_dtype))
    if format.grid == "global":
        assert step is not None, "the global grid has a step for each pair"
        codes = _global_codes(radius, angle, step, format)
        return PolarArray(pack(codes, format.layout), None, None, None, None, format)
    r, a = (_in_groups(part, format.group_size) for part in (radius, angle))
    counted = _in_groups(finite, format.group_size)
    r_scaled = jnp.sqrt(r) if format.radius_scale == "sqrt" else r
    radius_codes, radius_scale, radius_zero = _floor_codes(
        r_scaled, counted, format.radius_bits, format
    )
    start = _start(a, counted & (r > 0)) if format.cut == "gap" else jnp.zeros_like(a[:, :, :, :1])
    a = start + jnp.mod(a - start, TURN)
    angle_codes, angle_scale, angle_zero = _floor_codes(
        a, counted & (r > 0), format.angle_bits, format
    )
    codes = (radius_codes << format.angle_bits | angle_codes).reshape(radius.shape)
    return PolarArray(
        pack(codes, format.layout), radius_scale, radius_zero, angle_scale, angle_zero, format
    )


def dequantize(
    body: PolarArray, step: Float[Array, "B K 1 half"] | None = None
) -> Float[Array, "B K T H"]:
    """Return fp32 keys [B, K, T, H]. step: the step of the radii, on the global grid only."""
    return jnp.concatenate(key_halves(body, step), axis=-1)


def key_halves(
    body: PolarArray, step: Float[Array, "B K 1 half"] | None = None
) -> tuple[Pairs, Pairs]:
    """Return (k_i, k_{i+H/2}) in fp32. Tables of cos and sin serve all tokens of a group."""
    format = body.format
    radius, angle_codes = _radii_and_codes(body, step)
    if format.grid == "global":
        x, y = (radius * look_up(f(_full_circle(format)), angle_codes) for f in (jnp.cos, jnp.sin))
        return x, y
    low, high, low_codes, high_codes = *_half_tables(body), *_halves(angle_codes, format)
    (a, b), (c, d) = (look_up(t, low_codes) for t in low), (look_up(t, high_codes) for t in high)
    x, y = radius * (c * a - d * b), radius * (d * a + c * b)
    shape = (*radius.shape[:2], -1, format.half)
    return x.reshape(shape), y.reshape(shape)


def row_scores(
    q: Float[Array, "B K 1 H"], body: PolarArray, step: Float[Array, "B K 1 half"] | None = None
) -> Float[Array, "B K 1 T"]:
    """Return q . k for one query row, fp32.

    The query's products with the angles are looked up and multiplied by the radius. No key is made.

    On the global grid, one table of q_i cos(theta) + q_{i+H/2} sin(theta) serves the whole cache,
    with 2^angle_bits entries for each pair. For groups, with theta = high + low as in
    `_half_tables`,

        q . k = r (cos(high) (q_i cos(low) + q_{i+H/2} sin(low))
                   + sin(high) (q_{i+H/2} cos(low) - q_i sin(low)))
    """
    format = body.format
    radius, angle_codes = _radii_and_codes(body, step)
    x, y = jnp.split(q.astype(jnp.float32)[None], 2, axis=-1)  # [1, B, K, 1, H/2]
    if format.grid == "global":
        cos, sin = (f(_full_circle(format)) for f in (jnp.cos, jnp.sin))
        products = look_up(x * cos + y * sin, angle_codes)
    else:
        (cos, sin), high = _half_tables(body)
        low_codes, high_codes = _halves(angle_codes, format)
        x, y = x[..., None, :], y[..., None, :]
        along, across = look_up(x * cos + y * sin, low_codes), look_up(y * cos - x * sin, low_codes)
        products = look_up(high[0], high_codes) * along + look_up(high[1], high_codes) * across
    # A dot with ones, because XLA's CPU backend does not vectorize a sum over the last axis.
    rows = (radius * products).reshape(-1, format.half)
    ones = jnp.ones((format.half, 1), jnp.float32)
    return jnp.dot(rows, ones, precision=lax.Precision.HIGHEST).reshape(*radius.shape[:2], 1, -1)


def _radii_and_codes(body: PolarArray, step: Array | None) -> tuple[Array, Array]:
    """Return the radii, fp32, and the codes of the angles.

    Both are [B, K, T, H/2] on the global grid and [B, K, groups, size, H/2] for groups.
    """
    format = body.format
    codes = unpack(body.words, format.layout).astype(jnp.uint16)
    angle_codes = codes & jnp.uint16((1 << format.angle_bits) - 1)
    radius = (codes >> jnp.uint16(format.angle_bits)).astype(jnp.float32)
    if format.grid == "global":
        assert step is not None, "the global grid has a step for each pair"
        return radius * step, angle_codes
    angle_codes, radius = (_in_groups(c, format.group_size) for c in (angle_codes, radius))
    scale, zero = (
        s.astype(jnp.float32)[:, :, :, None]
        for s in (body.radius_scale, body.radius_zero)
        if s is not None
    )
    radius = (radius + 0.5) * scale + zero
    return jnp.square(radius) if format.radius_scale == "sqrt" else radius, angle_codes


def _full_circle(format: PolarFormat) -> Float[Array, "entries 1 1 1 1"]:
    """Return the angles of the global grid."""
    entries = 1 << format.angle_bits
    return (
        jnp.arange(entries, dtype=jnp.float32).reshape(-1, 1, 1, 1, 1) * (TURN / entries) - math.pi
    )


def _halves(angle_codes: Array, format: PolarFormat) -> tuple[Array, Array]:
    """Split angle codes into their low and high bits."""
    low_bits = format.angle_bits // 2
    return angle_codes & jnp.uint16((1 << low_bits) - 1), angle_codes >> jnp.uint16(low_bits)


def _half_tables(body: PolarArray) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return (cos, sin) of the angles that a code's low bits add, and of those at which its high
    bits start.

    Each is [entries, B, K, groups, 1, H/2]. An angle is the sum of the two, so two tables of
    2^(b/2) entries take the place of one of 2^b: 12 selects for a pair instead of 30 at 4 bits. The
    loop of two steps, sin v = cos(v - pi/2), keeps XLA's CPU backend from moving the cosines into
    the loop over tokens, which it does past any barrier (docs/decisions/queries_and_latents.md).
    """
    scale, zero = (
        s.astype(jnp.float32)[None, :, :, :, None]
        for s in (body.angle_scale, body.angle_zero)
        if s is not None
    )
    low = 1 << body.format.angle_bits // 2
    steps, starts = (
        jnp.arange(n, dtype=jnp.float32).reshape(-1, 1, 1, 1, 1, 1)
        for n in (low, (1 << body.format.angle_bits) // low)
    )
    angles = jnp.concatenate([steps * scale, (starts * low + 0.5) * scale + zero])
    cos, sin = lax.map(
        lambda quarter: jnp.cos(angles - quarter), jnp.asarray([0, TURN / 4], jnp.float32)
    )
    return (cos[:low], sin[:low]), (cos[low:], sin[low:])


def _global_codes(
    radius: Pairs, angle: Pairs, step: Float[Array, "B K 1 half"], format: PolarFormat
) -> UInt16[Array, "B K T half"]:
    turns, maximum = 1 << format.angle_bits, (1 << format.radius_bits) - 1
    angle_codes = jnp.mod(jnp.round((angle + math.pi) * (turns / TURN)), turns).astype(jnp.uint16)
    radius_codes = jnp.clip(jnp.round(radius / jnp.where(step == 0, 1, step)), 0, maximum).astype(
        jnp.uint16
    )
    return radius_codes << jnp.uint16(format.angle_bits) | angle_codes


def _floor_codes(
    v: Float[Array, "B K groups size half"],
    counted: Bool[Array, "B K groups size half"],
    bits: int,
    format: PolarFormat,
) -> tuple[UInt16[Array, "B K groups size half"], OfGroups, OfGroups]:
    """Return (codes, step, minimum): the bin of each entry in its group's range, and the range's
    step and minimum as stored.

    Only entries that are `counted` make the range. A group without any has bin 0 everywhere.
    """
    low = jnp.min(jnp.where(counted, v, jnp.inf), axis=3)
    high = jnp.max(jnp.where(counted, v, -jnp.inf), axis=3)
    low, high = (jnp.where(jnp.isfinite(bound), bound, 0) for bound in (low, high))
    step = stored_scale((high - low) / (1 << bits), format.scale_dtype, 1 << bits)
    minimum = as_stored(low, format.scale_dtype)
    wide_step, wide_minimum = (s.astype(jnp.float32)[:, :, :, None] for s in (step, minimum))
    bins = jnp.floor((v - wide_minimum) / jnp.where(wide_step == 0, 1, wide_step))
    return jnp.clip(bins, 0, (1 << bits) - 1).astype(jnp.uint16), step, minimum


def _start(
    angle: Float[Array, "B K groups size half"], counted: Bool[Array, "B K groups size half"]
) -> Array:
    """Return the angle in [-pi, pi) at which the largest gap between the angles of a group ends,
    [B, K, groups, 1, H/2]."""
    first = jnp.min(jnp.where(counted, angle, jnp.inf), axis=3, keepdims=True)
    first = jnp.where(jnp.isfinite(first), first, 0)
    ordered = jnp.sort(jnp.where(counted, angle, first), axis=3)
    before = jnp.concatenate([ordered[:, :, :, -1:] - TURN, ordered[:, :, :, :-1]], axis=3)
    return jnp.take_along_axis(ordered, jnp.argmax(ordered - before, axis=3, keepdims=True), axis=3)


def _in_groups(v: Array, size: int) -> Array:
    """Split tokens into groups: [B, K, T, half] -> [B, K, T / size, size, half]."""
    b, k, t, half = v.shape
    return v.reshape(b, k, t // size, size, half)
