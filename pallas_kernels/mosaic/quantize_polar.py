"""Quantize a group of keys to polar form on Mosaic GPU, by the equations of quantize/polar.py.

Each warp has eight pairs of every chunk, and all tokens of the group. So it finds ranges by itself,
and sorts a group's angles in registers to find their largest gap: a bitonic network over tokens, of
which the three highest bits of a place are the row of a matrix and the others its number, so that
only 6 of 28 exchanges for 128 tokens are shuffles.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# the stubs of MLIR lack results, and types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.matrices import Matrices, on_rows, splat
from pallas_kernels.mosaic.outliers import iota
from pallas_kernels.mosaic.quantize import stored_scale
from pallas_kernels.mosaic.registers import SIDE
from pallas_kernels.mosaic.ring import RingRows
from pallas_kernels.mosaic.rows import Rows
from pallas_kernels.mosaic.shuffles import moved_rows
from pallas_kernels.quantize.polar import TURN, Polar, PolarBlocks, from_cut, to_polar
from pallas_kernels.quantize.rounding import fold
from pallas_kernels.stored_scales import saturation_limit
from pallas_kernels.tiles.layout import SPAN, PlaneLayout

_ROW_BITS = SIDE.bit_length() - 1


class PolarGroup(NamedTuple):
    """A group of tokens of one head.

    Args:
        rows: of its tokens.
        words: of each plane set, [rows of words, words], whose first row is the group's.
        statistics: step and least value of its radii, and of its angles, each [1, H / 2].
        first: the first column of each chunk that this program has.
    """

    rows: RingRows
    words: Sequence[Any]
    statistics: Sequence[Any]
    first: Any


def quantize_polar(group: PolarGroup, blocks: PolarBlocks, interpret: bool) -> None:
    """Quantize a program's columns of a group."""
    _PolarWork(group, blocks, interpret).write()


@dataclasses.dataclass(frozen=True)
class _PolarWork:
    group: PolarGroup
    blocks: PolarBlocks
    interpret: bool

    @property
    def _layout(self) -> PlaneLayout:
        return self.blocks.layout

    @property
    def _rows(self) -> Rows:
        return Rows(self.interpret, 0, self.blocks.columns // SIDE)

    def write(self) -> None:
        p, words = self._layout, _Words(self._layout, self._store_words)
        for chunk in sorted(range(p.chunks), key=lambda chunk: chunk % p.tiles(p.sets[0])):
            spans, columns = self._spans(chunk), self._columns(chunk)
            bits = p.bits - self.blocks.angle_bits, self.blocks.angle_bits
            radii = [span.radius for span in spans]
            low = _extreme(jnp.min, jnp.minimum, radii, [span.finite for span in spans], jnp.inf)
            high = _extreme(jnp.max, jnp.maximum, radii, [span.finite for span in spans], -jnp.inf)
            radius_codes, *of_radii = self._bins(radii, low, high, bits[0])
            start, low, high = self._arc(spans)
            angles = [from_cut(span.angle, self._on_span(start)) for span in spans]
            angle_codes, *of_angles = self._bins(angles, low, high, bits[1])
            for ref, x in zip(self.group.statistics, (*of_radii, *of_angles), strict=True):
                self._rows.store(ref.at[:, columns], x.astype(ref.dtype), 1)
            for span, (radius, angle) in enumerate(zip(radius_codes, angle_codes, strict=True)):
                words.add(span, chunk, radius << bits[1] | angle)

    def _columns(self, tile: int) -> Any:
        return pl.ds(tile * self._layout.width + self.group.first, self.blocks.columns)

    def _store_words(self, span: int, plane_set: int, tile: int, word: jax.Array) -> None:
        run = SPAN // self._layout.slots
        at = pl.ds(span * run, run), self._columns(tile)
        self._rows.store(self.group.words[plane_set].at[at], word)

    def _spans(self, chunk: int) -> list[Polar]:
        """Return eight pairs of a chunk for each warp, of each span [WARPS, SPAN, SIDE]."""
        p, limit = self._layout, saturation_limit(self.blocks.scale_dtype)
        spans = []
        for first in range(0, self.blocks.group, SPAN):
            x, y = (
                self.group.rows.load(self._rows, first, SPAN, self._columns(c)).astype(jnp.float32)
                for c in (chunk, p.chunks + chunk)
            )
            spans.append(to_polar(x, y, limit))
        return spans

    def _arc(self, spans: Sequence[Polar]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the angle at which a group's circle is cut, and the least and the largest angle
        from there that count, all [WARPS, SIDE, SIDE] with equal rows."""
        counted = [span.counted for span in spans]
        first = _extreme(jnp.min, jnp.minimum, [span.angle for span in spans], counted, jnp.inf)
        first = jnp.where(first < jnp.inf, first, 0.0)
        # Angles that do not count are replaced by one that does.
        angles = [jnp.where(span.counted, span.angle, self._on_span(first)) for span in spans]
        angles = [x[:, i : i + SIDE] for x in angles for i in range(0, SPAN, SIDE)]
        start = splat(first.shape, 0.0)
        if self.blocks.in_gap:
            angles = self._sorted(angles)
            start = self._gap_end(angles)
        angles = [from_cut(angle, start) for angle in angles]
        low = jnp.min(fold(jnp.minimum, angles), axis=1)
        high = jnp.max(fold(jnp.maximum, angles), axis=1)
        return start, on_rows(low, SIDE), on_rows(high, SIDE)

    def _gap_end(self, ordered: Sequence[jax.Array]) -> jax.Array:
        """Return the smallest angle at which the largest gap between sorted angles ends."""
        previous = moved_rows(ordered[-1], self.interpret, by=SIDE - 1)
        previous = jnp.where(iota(previous.shape, 1) == 0, previous - TURN, previous)
        pairs = zip(ordered, [previous, *ordered[:-1]], strict=True)
        gaps = [angle - before for angle, before in pairs]
        widest = on_rows(jnp.max(fold(jnp.maximum, gaps), axis=1), SIDE)
        return _extreme(jnp.min, jnp.minimum, ordered, [gap == widest for gap in gaps], jnp.inf)

    def _sorted(self, x: Sequence[jax.Array]) -> list[jax.Array]:
        """Sort the tokens of matrices [WARPS, SIDE, SIDE], by row and then by matrix."""
        x, low = list(x), len(x).bit_length() - 1
        assert len(x) == 1 << low, "groups are a power of two"
        row = iota(x[0].shape, 1)

        def of_row(bit: int) -> jax.Array:
            return ((row >> bit) & 1) == 1

        # Runs of 2^merge tokens are sorted, every second one backwards, as bit `merge` of their
        # place says. The last is sorted forwards.
        for merge in range(1, low + _ROW_BITS + 1):
            of_rows = None
            if low <= merge < low + _ROW_BITS:
                of_rows = of_row(merge - low)
            for bit in reversed(range(merge)):
                if bit >= low:
                    upper = of_row(bit - low)
                    largest = upper if of_rows is None else upper != of_rows
                    for m, one in enumerate(x):
                        other = moved_rows(one, self.interpret, across=1 << (bit - low))
                        pair = jnp.maximum(one, other), jnp.minimum(one, other)
                        x[m] = jnp.where(largest, *pair)
                    continue
                for m in range(len(x)):
                    if (other := m | 1 << bit) == m:
                        continue
                    pair = jnp.minimum(x[m], x[other]), jnp.maximum(x[m], x[other])
                    if of_rows is not None:
                        pair = jnp.where(of_rows, *pair[::-1]), jnp.where(of_rows, *pair)
                    elif (m >> merge) & 1:
                        pair = pair[::-1]
                    x[m], x[other] = pair
        return x

    def _bins(
        self, values: Sequence[jax.Array], low: jax.Array, high: jax.Array, bits: int
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Return the bins of values in a range, in int32, and its step and least value [WARPS,
        SIDE, SIDE], rounded as they are stored."""
        low, high = (jnp.where(jnp.abs(bound) < jnp.inf, bound, 0.0) for bound in (low, high))
        steps, dtype = 1 << bits, self.blocks.scale_dtype
        step = stored_scale((high - low) / steps, dtype, steps)
        minimum = low.astype(dtype).astype(jnp.float32)
        divisor = jnp.where(step == 0, 1.0, step)
        wide_minimum, wide_divisor = self._on_span(minimum), self._on_span(divisor)
        # A conversion truncates, and quotients below 0 have bin 0.
        bins = [jnp.clip((v - wide_minimum) / wide_divisor, 0.0, steps - 1.0) for v in values]
        return [b.astype(jnp.int32) for b in bins], step, minimum

    def _on_span(self, x: jax.Array) -> jax.Array:
        """Repeat a matrix with equal rows on SPAN rows."""
        return Matrices(self.interpret).stacked([x], SPAN)


class _Words:
    """The words of spans, each stored once it is full."""

    def __init__(self, layout: PlaneLayout, store: Any):
        """Keep `store`, which is called with (span, plane set, tile, int32 words)."""
        self._layout, self._store = layout, store
        self._open: dict[tuple[int, int, int], tuple[jax.Array, int]] = {}

    def add(self, span: int, chunk: int, codes: jax.Array) -> None:
        """Add the codes of a span's tokens, [WARPS, SPAN, SIDE]."""
        p = self._layout
        run = SPAN // p.slots
        for (plane_set, bits), slot in itertools.product(enumerate(p.sets), range(p.slots)):
            low = sum(p.sets[:plane_set])
            field, tile = divmod(slot * p.chunks + chunk, p.tiles(bits))
            of_slot = codes[:, slot * run : (slot + 1) * run]
            part = ((of_slot >> low) & ((1 << bits) - 1)) << (bits * field)
            word, count = part.astype(jnp.int16), 1
            if (place := (span, plane_set, tile)) in self._open:
                before, count = self._open.pop(place)
                word, count = before | word, count + 1
            if count == 16 // bits:
                self._store(span, plane_set, tile, word)
            else:
                # The barrier keeps two words in a register, where LLVM would widen them.
                self._open[place] = lax.optimization_barrier(word), count


def _extreme(
    reduced: Any,
    pairwise: Any,
    values: Sequence[jax.Array],
    counted: Sequence[jax.Array],
    nothing: float,
) -> jax.Array:
    """Return the smallest or largest of the values that count, [WARPS, SIDE, SIDE] with equal rows,
    or `nothing` if none does."""
    masked = [jnp.where(mask, v, nothing) for v, mask in zip(values, counted, strict=True)]
    return on_rows(reduced(functools.reduce(pairwise, masked), axis=1), SIDE)
