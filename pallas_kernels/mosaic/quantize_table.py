"""Quantize a span of rows to codes of a table on Mosaic GPU, by the equations of quantize/table.py.

All warps of a program write the same span. If all heads share a token's range, each head's program
reads the rows of all of them. Ranges without outliers are found by all warps alike. With outliers,
that takes many passes over the rows, so each warp takes eight tokens, and tells the others.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.matrices import Matrices, in_lanes, on_warps, splat
from pallas_kernels.mosaic.outliers import iota
from pallas_kernels.mosaic.quantize import SpanAccess, Spans, stored_scale
from pallas_kernels.mosaic.registers import SIDE, WARPS
from pallas_kernels.mosaic.ring import RingRows
from pallas_kernels.mosaic.rows import Rows
from pallas_kernels.mosaic.run_words import apart
from pallas_kernels.quantize.rounding import finite_or, within_limit
from pallas_kernels.quantize.table import Ranges, TableBlocks
from pallas_kernels.stored_scales import saturation_limit

COLUMNS = 32  # channels of a head that warps read at a time, a divisor of all head dims
Entries = tuple[jax.Array, jax.Array]  # and which of them count


def quantize_table_span(
    pool: Pool, ranges: Ranges | None, head: Any, words: Sequence[Any], scales: Sequence[Any]
) -> None:
    """Write one head of a span.

    Args:
        pool: the rows and the format.
        ranges: `Pool.of_tokens`, if the format has outliers of tokens.
        head: the KV head to write.
        words, scales: of that head, or scales of all heads (quantize.Spans).
    """
    blocks, interpret = pool.blocks, pool.interpret
    access = SpanAccess(Spans(pool.rows_of(head), None, words, scales), blocks.layout, 0, interpret)
    out, middles, width = access.words(), pool.middles(), blocks.layout.width
    for slot, number, chunks in access.groups(blocks.group or width):
        if ranges is not None:
            of_slot = _of_slot(ranges, slot, access, interpret)
        elif blocks.group is not None:
            of_slot = _without_outliers(pool, head, access, slot, chunks)
        else:
            of_slot = pool.of_channels(head, access.columns(chunks[0]), access.run)
        for c in chunks:
            x = of_slot.clean(access.load(slot, c))
            codes = _codes(x, of_slot.scale, of_slot.zero, middles)
            # Either keeps rows of later chunks from being read before. Each spills where the other
            # does not.
            plain = ranges is None and blocks.group is not None
            out.add(slot, c, apart(codes, interpret) if plain else lax.optimization_barrier(codes))
        if blocks.group is None:
            continue

        @pl.when((head == 0) | (blocks.heads == 1))
        def _(slot: int = slot, number: int = number, of_slot: Ranges = of_slot) -> None:
            access.store_scales(slot, number, (of_slot.scale, of_slot.zero))


@dataclasses.dataclass(frozen=True)
class Pool:
    """The rows that a span's codes depend on, and their format.

    Args:
        rows_of: returns a head's rows.
        heads: the number of KV heads.
        blocks: the format.
        levels, values: refs [1, 2^bits].
        inputs: refs of scale and zero point of channels and of thresholds (table.TableBlocks).
    """

    rows_of: Callable[[Any], RingRows]
    heads: int
    blocks: TableBlocks
    levels: Any
    values: Any
    inputs: Sequence[Any]
    interpret: bool

    @property
    def channels(self) -> int:
        return self.blocks.layout.channels

    def middles(self) -> list[jax.Array]:
        levels = [self.levels[0, i] for i in range(1 << self.blocks.layout.bits)]
        return [(high + low) / 2 for low, high in itertools.pairwise(levels)]

    def load(self, head: Any, first: Any) -> jax.Array:
        """Load COLUMNS channels, eight tokens for each warp, [WARPS, SIDE, COLUMNS] in fp32."""
        rows, columns = Rows(self.interpret, SIDE), pl.ds(first, COLUMNS)
        return self.rows_of(head).load(rows, 0, SIDE, columns).astype(jnp.float32)

    def over_heads(self, step: Callable[[Any, Any, Any], Any], start: Any) -> Any:
        """Return the carry of step(head, first channel, carry) over the rows of all heads."""
        chunks = jnp.int32(self.channels // COLUMNS)

        def step_of_chunk(i: Any, carry: Any) -> Any:
            return step(lax.div(i, chunks), COLUMNS * lax.rem(i, chunks), carry)

        return lax.fori_loop(jnp.int32(0), self.heads * chunks, step_of_chunk, start)

    def of_channels(self, head: Any, columns: Any, rows: int) -> Ranges:
        """Return the ranges of channels, which come with the parameters, [WARPS, rows, columns]."""
        once, ops = Rows(self.interpret, 0), Matrices(self.interpret)
        loaded = [once.load(ref.at[pl.ds(head, 1), columns], SIDE) for ref in self.inputs]
        scale, zero, *thresholds = (ops.stacked([x], rows) for x in loaded)
        lower, upper = thresholds or (None, None)
        return Ranges(zero - scale, zero + scale, lower, upper, scale, zero, False)

    def of_tokens(self) -> Ranges:
        """Return the ranges and thresholds of tokens over all heads, [WARPS, SIDE, COLUMNS] with
        equal columns, eight tokens in each warp."""
        dtype, limit = self.blocks.scale_dtype, saturation_limit(self.blocks.scale_dtype)

        def finite(x: jax.Array) -> Entries:
            return jnp.clip(x, -limit, limit), jnp.abs(x) < jnp.inf

        low, high = self._range(finite)
        ranges = Ranges(low, high, None, None, low, high, True)
        if self.inputs:
            lower, upper = (in_lanes(jnp.broadcast_to(ref[0, 0], low.shape)) for ref in self.inputs)
        else:
            lower, upper = -self._innermost(-1, ranges), self._innermost(1, ranges)
        ranges = ranges._replace(lower=lower, upper=upper)

        def kept(x: jax.Array) -> Entries:
            clean = ranges.clean(x)
            return clean, jnp.logical_not(ranges.outliers(clean))

        low, high = (jnp.clip(bound, -limit, limit) for bound in self._range(kept))
        scale = stored_scale((high - low) / 2, dtype, 2)
        zero = ((high + low) / 2).astype(dtype).astype(jnp.float32)
        return ranges._replace(scale=scale, zero=zero)

    def _range(self, entries: Callable[[jax.Array], Entries]) -> tuple[jax.Array, jax.Array]:
        """Return the least and the largest of a token's entries that count, or 0 if none does."""

        def widen(head: Any, first: Any, bounds: Entries) -> Entries:
            x, counts = entries(self.load(head, first))
            low, high = bounds
            return (
                jnp.minimum(low, jnp.where(counts, x, jnp.inf)),
                jnp.maximum(high, jnp.where(counts, x, -jnp.inf)),
            )

        shape = WARPS, SIDE, COLUMNS
        low, high = self.over_heads(widen, (splat(shape, jnp.inf), splat(shape, -jnp.inf)))
        bounds = (on_columns(f(x, axis=2)) for f, x in ((jnp.min, low), (jnp.max, high)))
        low, high = (jnp.where(jnp.abs(bound) < jnp.inf, bound, 0.0) for bound in bounds)
        return low, high

    def _innermost(self, sign: int, ranges: Ranges) -> jax.Array:
        """Return the least number below or at `per_side` + 1 entries of a token, times a sign. It
        is the largest entry, then the next smaller one, and so on."""
        shape, per_side = (WARPS, SIDE, COLUMNS), self.blocks.per_side

        def next_smaller(_: Any, carry: Any) -> Any:
            bound, count = carry  # the number of entries >= bound

            def compare(head: Any, first: Any, best: Any) -> Any:
                x, (maximum, equal) = sign * ranges.clean(self.load(head, first)), best
                new = jnp.maximum(maximum, jnp.where(x < bound, x, -jnp.inf))
                before = jnp.where(new == maximum, equal, 0.0)
                return new, before + jnp.where(x == new, 1.0, 0.0)

            maximum, equal = self.over_heads(compare, (splat(shape, -jnp.inf), splat(shape, 0.0)))
            largest = on_columns(jnp.max(maximum, axis=2))
            more = on_columns(jnp.sum(jnp.where(maximum == largest, equal, 0.0), axis=2))
            enough = count > per_side
            return jnp.where(enough, bound, largest), jnp.where(enough, count, count + more)

        start = splat(shape, jnp.inf), splat(shape, 0.0)
        return lax.fori_loop(0, per_side + 1, next_smaller, start)[0]


def on_columns(x: jax.Array, columns: int = COLUMNS) -> jax.Array:
    """Repeat numbers [WARPS, rows] on columns."""
    return in_lanes(lax.broadcast_in_dim(x, (*x.shape, columns), (0, 1)))


def _without_outliers(
    pool: Pool, head: Any, access: SpanAccess, slot: int, chunks: range
) -> Ranges:
    """Return the ranges of a slot's tokens in these chunks of channels, of this head or of all
    heads, the same in all warps."""
    layout, dtype = pool.blocks.layout, pool.blocks.scale_dtype
    shape = WARPS, access.run, layout.width

    def widen(head: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        of_head = dataclasses.replace(access, spans=access.spans._replace(rows=pool.rows_of(head)))
        for c in chunks:
            x = of_head.load(slot, c)
            low = jnp.minimum(low, finite_or(x, jnp.inf))
            high = jnp.maximum(high, finite_or(x, -jnp.inf))
        return low, high

    bounds = splat(shape, jnp.inf), splat(shape, -jnp.inf)
    if pool.blocks.heads > 1:
        low, high = lax.fori_loop(0, pool.heads, widen, bounds)
    else:
        low, high = widen(head, bounds)
    low, high = (
        on_columns(within_limit(f(bound, axis=2), saturation_limit(dtype)), layout.width)
        for f, bound in ((jnp.min, low), (jnp.max, high))
    )
    scale = stored_scale((high - low) / 2, dtype, 2)
    zero = ((high + low) / 2).astype(dtype).astype(jnp.float32)
    return Ranges(low, high, None, None, scale, zero, True)


def _of_slot(ranges: Ranges, slot: int, access: SpanAccess, interpret: bool) -> Ranges:
    """Return ranges of a slot's tokens in all warps, of those that each warp has of eight."""

    def rows(x: jax.Array) -> jax.Array:
        x, first = x[:, :, :SIDE], slot * access.run
        warps = iota(x.shape, 0)
        parts = [
            on_warps(jnp.sum(jnp.where(warps == token // SIDE, x, 0.0), axis=0))
            for token in range(first, first + access.run, SIDE)
        ]
        wide = [on_columns(jnp.max(part, axis=2), access.layout.width) for part in parts]
        ops = Matrices(interpret)
        return wide[0] if len(wide) == 1 else ops.stacked(wide, access.run)

    low, high, scale, zero = (rows(x) for x in (ranges.low, ranges.high, ranges.scale, ranges.zero))
    return Ranges(low, high, None, None, scale, zero, True)


def _codes(
    x: jax.Array, scale: jax.Array, zero: jax.Array, middles: Sequence[jax.Array]
) -> jax.Array:
    """Return the index of the level nearest to (x - zero) / scale, the lower one on a tie."""
    y = (x - zero) / jnp.where(scale == 0, 1.0, scale)
    codes = jnp.zeros_like(y)
    for middle in middles:
        codes = jnp.where(y > middle, codes + 1.0, codes)
    # The lowest bits of 1.5 * 2^23 + code are those of the code (rounding.Job.levels).
    return codes + 1.5 * 2**23
