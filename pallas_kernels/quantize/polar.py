"""Quantize blocks of keys to polar form as they leave their ring: an angle and a radius for each
RoPE pair (i, i + H/2).

    k_i = r cos(theta),  k_{i+H/2} = r sin(theta),
    code = floor((v - min) / step),  step = (max - min) / 2^b

for v = r and v = theta, over a group of tokens of a pair. The circle of a group's angles is cut
open in its largest gap, or at the angle 0. These are the equations of `kvq_jax.arrays.polar_array`,
which also describes their behaviour on entries that are not finite.

Exactness. Steps and least values are equal to 1 ulp of the stored dtype, for angles provided that
both implementations find the same gap. Codes differ by one if v lies within rounding of a bin's
edge, because a GPU divides approximately and has its own arc tangent.

The largest gap needs the predecessor of each angle. Kernels cannot sort, so each angle is compared
with all others: the loop takes one token at a time, computes its angle again, and keeps for each
angle of the tile the largest one below it. That is 3 operations for each two of n tokens, in place
of log^2(n) / 2 exchanges. For 128 tokens it is an estimated 20,000 instructions of a warp, in one
step of 128. Source: Wu et al., PolarQuant, sections 3.1 and 3.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantize.blocks import Source
from pallas_kernels.quantize.rounding import fold
from pallas_kernels.quantize.words import CodeWriter, tokens_of_slot
from pallas_kernels.quantize.writer import BlockWriter
from pallas_kernels.stored_scales import saturation_limit, stored_scale
from pallas_kernels.tiles.layout import SPAN, PlaneLayout

TURN = 2 * math.pi
_ELEMENTS = 4096  # pairs that a program holds
_MIN_COLUMNS = 8


class Polar(NamedTuple):
    """Pairs in polar form, all [rows, columns], or with more axes before.

    radius; angle in [-pi, pi); finite: both entries of the pair are finite; counted: the pair also
    has an angle.
    """

    radius: Float[Array, "*batch rows columns"]
    angle: Float[Array, "*batch rows columns"]
    finite: Bool[Array, "*batch rows columns"]
    counted: Bool[Array, "*batch rows columns"]


@dataclasses.dataclass(frozen=True)
class PolarBlocks(BlockWriter):
    """Keys after RoPE in groups of tokens, which are the units.

    Args:
        layout: of the codes radius code << angle_bits | angle code of H/2 pairs.
        angle_bits: of an angle code.
        group: tokens of a group.
        in_gap: cut the circle in its largest gap, else at the angle 0.
        scale_dtype: of steps and least values.

    arrays: the words of each plane set [B, K, S / n, w], then step and least value of the radii,
    and of the angles, [B, K, S / group, H/2]. inputs: none.
    """

    layout: PlaneLayout
    angle_bits: int
    group: int
    in_gap: bool
    scale_dtype: str = "float16"

    @property
    def unit(self) -> int:
        return self.group

    @property
    def run(self) -> int:
        return 1

    @property
    def programs(self) -> int:
        return self.layout.width // self.columns

    @property
    def warps(self) -> int:
        return 8

    @property
    def columns(self) -> int:
        """Return the columns of each chunk that a program has."""
        return min(
            self.layout.width, max(_MIN_COLUMNS, _ELEMENTS // (self.group * self.layout.chunks))
        )

    def check(self, ring: Float[Array, "B K R H"], block: int) -> None:
        channels, p = ring.shape[3], self.layout
        if p.chunks * p.width * 2 != channels:
            raise ValueError(
                f"keys of {channels} channels are not {p.chunks} chunks of {p.width} pairs: use the"
                " XLA path"
            )
        if self.group % SPAN or block % self.group:
            raise ValueError(
                f"groups of {self.group} tokens must be a multiple of {SPAN} and divide a block of"
                f" {block}"
            )

    def write(
        self,
        program: Any,
        head: Any,
        source: Source,
        place: Any,
        inputs: Sequence[Any],
        arrays: Sequence[Any],
    ) -> None:
        p, sets, columns = self.layout, len(self.layout.sets), self.columns
        first, group = program * columns, lax.div(place, self.group)
        words, statistics = CodeWriter(p, arrays[:sets], head, place, first, columns), arrays[sets:]

        def pairs(tokens: Any, chunk: int) -> Polar:
            x, y = (
                source.read(head, tokens, pl.ds(at + chunk * p.width + first, columns))
                for at in (0, p.chunks * p.width)
            )
            return to_polar(x, y, saturation_limit(self.scale_dtype))

        tiles = [
            [pairs(tokens_of_slot(p, slot, self.group), chunk) for slot in range(p.slots)]
            for chunk in range(p.chunks)
        ]
        starts = (
            self._starts(tiles, pairs)
            if self.in_gap
            else [jnp.zeros((columns,), jnp.float32)] * p.chunks
        )
        for chunk, (slots, start) in enumerate(zip(tiles, starts, strict=True)):
            radii = self._bins(
                [tile.radius for tile in slots],
                [tile.finite for tile in slots],
                p.bits - self.angle_bits,
            )
            angles = self._bins(
                [from_cut(tile.angle, start[None]) for tile in slots],
                [tile.counted for tile in slots],
                self.angle_bits,
            )
            for slot, (radius, angle) in enumerate(zip(radii.codes, angles.codes, strict=True)):
                words.add(slot, chunk, radius << self.angle_bits | angle)
            for ref, statistic in zip(
                statistics, (radii.step, radii.minimum, angles.step, angles.minimum), strict=True
            ):
                ref[head, group, pl.ds(chunk * p.width + first, columns)] = statistic.astype(
                    ref.dtype
                )
        words.store()

    def _starts(
        self, tiles: Sequence[Sequence[Polar]], pairs: Callable[[Any, int], Polar]
    ) -> list[Float[Array, " columns"]]:
        """Return the smallest angle at which the largest gap between a group's angles ends, or 0 if
        no angle counts.
        """

        def compare(token: Int[Array, ""], below: Any) -> Any:
            others = [pairs(pl.ds(token, 1), chunk) for chunk in range(len(tiles))]
            return [
                [
                    _larger_below(tile, nearest, other)
                    for tile, nearest in zip(slots, of_slots, strict=True)
                ]
                for slots, of_slots, other in zip(tiles, below, others, strict=True)
            ]

        nothing = [[jnp.full(tile.angle.shape, -jnp.inf) for tile in slots] for slots in tiles]
        below = lax.fori_loop(0, self.group, compare, nothing)
        return [_start(slots, of_slots) for slots, of_slots in zip(tiles, below, strict=True)]

    def _bins(self, values: Sequence[Array], counted: Sequence[Array], bits: int) -> Bins:
        """Return the bin of each value in the range of the values that count. Step and least value
        are rounded as they are stored.
        """
        low = _extreme(jnp.minimum, jnp.min, values, counted, jnp.inf)
        high = _extreme(jnp.maximum, jnp.max, values, counted, -jnp.inf)
        low, high = (jnp.where(jnp.abs(bound) < jnp.inf, bound, 0.0) for bound in (low, high))
        steps = 1 << bits
        step = stored_scale((high - low) / steps, self.scale_dtype, steps).astype(jnp.float32)
        minimum = low.astype(self.scale_dtype).astype(jnp.float32)
        divisor = jnp.where(step == 0, 1.0, step)
        bins = [jnp.floor((v - minimum[None]) / divisor[None]) for v in values]
        return Bins(
            [jnp.clip(b, 0.0, float((1 << bits) - 1)).astype(jnp.int32) for b in bins],
            step,
            minimum,
        )


class Bins(NamedTuple):
    """int32 codes of the tokens of each slot, and the step and least value [columns] of their group
    as fp32 numbers of the stored dtype.
    """

    codes: list[Int[Array, "rows columns"]]
    step: Float[Array, " columns"]
    minimum: Float[Array, " columns"]


def to_polar(
    x: Float[Array, "*batch rows columns"], y: Float[Array, "*batch rows columns"], limit: float
) -> Polar:
    """Return pairs in polar form, as `polar_array.to_polar` does: NaN counts as 0, infinities as
    `limit`, which also bounds radii.
    """
    finite = (jnp.abs(x) < jnp.inf) & (jnp.abs(y) < jnp.inf)
    x, y = (jnp.where(part == part, jnp.clip(part, -limit, limit), 0.0) for part in (x, y))
    larger, smaller = jnp.maximum(jnp.abs(x), jnp.abs(y)), jnp.minimum(jnp.abs(x), jnp.abs(y))
    ratio = smaller / jnp.where(larger == 0, 1.0, larger)
    radius = jnp.minimum(larger * jnp.sqrt(1 + ratio * ratio), limit)
    angle = jnp.arctan2(y, x)
    angle = jnp.where(angle >= np.float32(math.pi), -np.float32(math.pi), angle)
    return Polar(radius, angle, finite, finite & (radius > 0))


def from_cut(angle: Float[Array, "..."], start: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the same angles in [start, start + one turn). `start` may have a single row."""
    ahead = angle - start
    return start + jnp.where(ahead >= TURN, ahead - TURN, jnp.where(ahead < 0, ahead + TURN, ahead))


def _larger_below(
    tile: Polar, nearest: Float[Array, "rows columns"], other: Polar
) -> Float[Array, "rows columns"]:
    """Return, for each angle of a tile, the larger of the largest angle below it so far and the
    other one, [1, columns], if that is below it and counts.
    """
    return jnp.where(
        other.counted & (other.angle < tile.angle), jnp.maximum(nearest, other.angle), nearest
    )


def _start(slots: Sequence[Polar], below: Sequence[Array]) -> Float[Array, " columns"]:
    angles, counted = [tile.angle for tile in slots], [tile.counted for tile in slots]
    first = _extreme(jnp.minimum, jnp.min, angles, counted, jnp.inf)
    last = _extreme(jnp.maximum, jnp.max, angles, counted, -jnp.inf)
    before = [jnp.where(nearest > -jnp.inf, nearest, (last - TURN)[None]) for nearest in below]
    gaps = [angle - previous for angle, previous in zip(angles, before, strict=True)]
    widest = _extreme(jnp.maximum, jnp.max, gaps, counted, -jnp.inf)
    ends = [mask & (gap == widest[None]) for gap, mask in zip(gaps, counted, strict=True)]
    start = _extreme(jnp.minimum, jnp.min, angles, ends, jnp.inf)
    return jnp.where(first < jnp.inf, start, 0.0)


def _extreme(
    pairwise: Any, reduced: Any, values: Sequence[Array], counted: Sequence[Array], nothing: float
) -> Float[Array, " columns"]:
    """Return the smallest or largest of the values that count, for each column, or `nothing` if
    none does.
    """
    return reduced(
        fold(
            pairwise, [jnp.where(mask, v, nothing) for v, mask in zip(values, counted, strict=True)]
        ),
        axis=0,
    )
