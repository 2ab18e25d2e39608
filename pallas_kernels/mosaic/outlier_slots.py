"""Collect the outliers of a span into the slots of their pool on Mosaic GPU, by the equations of
quantize/outlier_slots.py.

Each warp has eight tokens of the span, and all warps together count. An entry's place among a row's
outliers is a product of the row's mask with a triangle of ones, which tensor cores sum exactly.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# the stubs of MLIR lack results, and types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.matrices import Matrices, on_rows, on_warps, splat
from pallas_kernels.mosaic.outliers import iota
from pallas_kernels.mosaic.quantize_table import COLUMNS, Pool, on_columns
from pallas_kernels.mosaic.registers import LANES, ROWS, SIDE, WARPS, element, ref_dtype
from pallas_kernels.mosaic.shuffles import moved_rows, scalar
from pallas_kernels.quantize.outlier_slots import MAX_DROPPED, Slots, magnitude_bits, smallest_kept
from pallas_kernels.quantize.table import Ranges

SHAPE = WARPS, SIDE, COLUMNS
Counts = Callable[[jax.Array], jax.Array]  # bits of residuals -> which of them count


def collect(pool: Pool, ranges: Ranges | None, head: Any, number: Any, refs: Sequence[Any]) -> None:
    """Write the slots of one head of a pool.

    Args:
        pool: the rows and the format.
        ranges: `Pool.of_tokens`, if the format has ranges of tokens.
        head: the KV head to write.
        number: of the pool.
        refs: index [n, P], residual [n, P], ends [n, K] and, if slots overflow, dropped [n].
    """
    slots, heads = pool.blocks.slots, pool.heads
    assert slots is not None, "the caller has slots"
    values = [pool.values[0, i] for i in range(1 << pool.blocks.layout.bits)]
    work = _Counting(pool, ranges, pool.middles(), values)
    index_ref, residual_ref, ends_ref, *dropped_ref = refs
    sides = index_ref.at[number], residual_ref.at[number]
    before, total = work.counted(head, lambda bits: bits > -1)
    minimum, equal_before, kept_equal = jnp.int32(-1), jnp.int32(0), jnp.int32(0)
    if slots.overflows:
        minimum = smallest_kept(
            slots.count, total, lambda minimum: work.counted(head, lambda bits: bits > minimum)[1]
        )
        before, larger = work.counted(head, lambda bits: bits > minimum)
        equal_before, _ = work.counted(head, lambda bits: bits == minimum)
        kept_equal = slots.count - larger
        before = before + jnp.minimum(equal_before, kept_equal)
        [ref], dropped = dropped_ref, jnp.clip(total - slots.count, 0, MAX_DROPPED)

        @pl.when(head == 0)
        def _() -> None:
            ref[number] = dropped.astype(ref.dtype)

    def kept(chunk: Any, equals: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the mask of kept entries, their residuals, and the number of equal ones of each
        row so far."""
        mask, residual = work.residuals(head, chunk * COLUMNS)
        bits = magnitude_bits(residual)
        keeps = mask & (bits > minimum)
        if slots.overflows:
            equal = mask & (bits == minimum)
            keeps |= equal & (equals + work.rank(equal) < kept_equal)
            equals = equals + _of_rows(equal)
        return keeps, residual, equals

    def row_totals(of: Any, start: jax.Array) -> jax.Array:
        nothing = splat(SHAPE, 0, jnp.int32)

        def add(chunk: Any, carry: Any) -> Any:
            keeps, equals = of(chunk, carry[1])
            return carry[0] + _of_rows(keeps), equals

        return lax.fori_loop(0, chunks, add, (nothing, start))[0]

    chunks = pool.channels // COLUMNS
    equals = splat(SHAPE, 0, jnp.int32)
    if slots.overflows:

        def equal(chunk: Any, rows: jax.Array) -> Any:
            mask, residual = work.residuals(head, chunk * COLUMNS)
            return mask & (magnitude_bits(residual) == minimum), rows

        equals = equal_before + work.rows_before(row_totals(equal, equals))[0]

    def keeps_of(chunk: Any, equals: jax.Array) -> Any:
        keeps, _, equals = kept(chunk, equals)
        return keeps, equals

    first, count = work.rows_before(row_totals(keeps_of, equals))
    largest = float(jnp.finfo(residual_ref.dtype).max)
    tokens = SIDE * iota(SHAPE, 0) + iota(SHAPE, 1)

    def store(chunk: Any, carry: Any) -> Any:
        places, equals = carry
        keeps, residual, equals = kept(chunk, equals)
        index = tokens * pool.channels + chunk * COLUMNS + iota(SHAPE, 2)
        residual = jnp.clip(residual, -largest, largest).astype(residual_ref.dtype)
        at = jnp.where(keeps, places + work.rank(keeps), -1)
        scatter(sides, at, (index, residual), pool.interpret)
        return places + _of_rows(keeps), equals

    lax.fori_loop(0, chunks, store, (before + first, equals))
    end = before + count
    ends_ref[number, head] = end.astype(ends_ref.dtype)

    @pl.when(head == heads - 1)
    def _() -> None:
        _clear(slots, end, sides, pool.interpret)


@dataclasses.dataclass(frozen=True)
class _Counting:
    """Counts of outliers. All arrays are [WARPS, SIDE, COLUMNS]."""

    pool: Pool
    ranges: Ranges | None
    middles: Sequence[jax.Array]
    values: Sequence[jax.Array]

    def residuals(self, head: Any, first: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mask of outliers and x - x^ of COLUMNS channels."""
        ranges = self.ranges
        if ranges is None:
            ranges = self.pool.of_channels(head, pl.ds(first, COLUMNS), SIDE)
        clean = ranges.clean(self.pool.load(head, first))
        y = (clean - ranges.zero) / jnp.where(ranges.scale == 0, 1.0, ranges.scale)
        entries = jnp.where(y > self.middles[0], self.values[1], self.values[0])
        for middle, value in zip(self.middles[1:], self.values[2:], strict=True):
            entries = jnp.where(y > middle, value, entries)
        return ranges.outliers(clean), clean - (entries * ranges.scale + ranges.zero)

    def counted(self, head: Any, counts: Counts) -> tuple[Any, Any]:
        """Return how many outliers have residuals with such bits, in the heads before this one and
        in all heads."""

        def add(other: Any, first: Any, sums: Any) -> Any:
            mask, residual = self.residuals(other, first)
            here = jnp.where(mask & counts(magnitude_bits(residual)), 1, 0)
            return sums[0] + jnp.where(other < head, here, 0), sums[1] + here

        nothing = splat(SHAPE, 0, jnp.int32)
        of_lanes = self.pool.over_heads(add, (nothing, nothing))
        before, total = (self._sum(x) for x in of_lanes)
        return before, total

    def _sum(self, x: jax.Array) -> Any:
        of_warp = on_rows(jnp.sum(on_columns(jnp.sum(x, axis=2), SIDE), axis=1), SIDE)
        return scalar(jnp.sum(of_warp, axis=0), self.pool.interpret)

    def rows_before(self, of_rows: jax.Array) -> tuple[jax.Array, Any]:
        """Return, for each row, the sum of the rows before it, and the sum of all.

        of_rows: with equal columns.
        """
        of_row, row = of_rows[:, :, :SIDE], iota((WARPS, SIDE, SIDE), 1)
        before, step = of_row, 1
        while step < SIDE:
            moved = moved_rows(before, self.pool.interpret, by=SIDE - step)
            before, step = before + jnp.where(row >= step, moved, 0), 2 * step
        before, warps = before - of_row, iota(of_row.shape, 0)
        of_warps, total = on_rows(jnp.sum(of_row, axis=1), SIDE), jnp.int32(0)
        for warp in range(WARPS):
            of_warp = jnp.sum(jnp.where(warps == warp, of_warps, 0), axis=0)
            before = before + jnp.where(warps > warp, on_warps(of_warp), 0)
            total = total + scalar(of_warp, self.pool.interpret)
        return on_columns(jnp.max(before, axis=2)), total

    def rank(self, mask: jax.Array) -> jax.Array:
        """Return how many entries of the mask come before each entry of its row."""
        ops, square = Matrices(self.pool.interpret), (WARPS, COLUMNS, COLUMNS)
        column, summed = (iota(square, axis) for axis in (1, 2))
        triangle = jnp.where(summed < column, 1.0, 0.0).astype(jnp.float16)
        ones = jnp.where(mask, 1.0, 0.0).astype(jnp.float16)
        ones = ops.stacked([ones], ROWS)  # as many rows as a product has
        counts = ops.product(splat((WARPS, ROWS, COLUMNS), 0.0), ones, triangle)
        return counts[:, :SIDE].astype(jnp.int32)


def _of_rows(mask: jax.Array) -> jax.Array:
    """Return how many entries of the mask each row has, on all columns."""
    return on_columns(jnp.sum(jnp.where(mask, 1, 0), axis=2))


def _clear(slots: Slots, first: Any, sides: Sequence[Any], interpret: bool) -> None:
    """Write zeros into the slots from `first` on."""
    each = int(np.prod(SHAPE))
    place = (iota(SHAPE, 0) * SIDE + iota(SHAPE, 1)) * COLUMNS + iota(SHAPE, 2)
    zeros = splat(SHAPE, 0, jnp.int32), splat(SHAPE, 0.0, sides[1].dtype)

    def step(i: Any, _: None) -> None:
        at = first + i * each + place
        scatter(sides, jnp.where(at < slots.count, at, -1), zeros, interpret)

    lax.fori_loop(0, lax.div(slots.count - first + each - 1, jnp.int32(each)), step, None)


def scatter(
    refs: Sequence[Any], places: jax.Array, arrays: Sequence[jax.Array], interpret: bool
) -> None:
    """Store numbers [WARPS, rows, columns] into arrays [n] in global memory.

    Args:
        refs: arrays of 16 bits.
        places: of each number in all of them, int32. Numbers of negative places are left out.
        arrays: for each array, numbers of its dtype, or int32.
    """
    if interpret:
        flat = places.reshape(-1)
        order = jnp.argsort(jnp.where(flat < 0, 1, 0), stable=True)

        def store(i: jax.Array, _: None) -> None:
            for ref, x in zip(refs, arrays, strict=True):
                ref[flat[order[i]]] = x.reshape(-1)[order[i]].astype(ref.dtype)

        lax.fori_loop(0, jnp.sum((flat >= 0).astype(jnp.int32)), store, None)
        return
    inline: Any = plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *[LANES] * (1 + len(arrays)))
    )

    @inline
    def stores(ctx: Any, *operands: Any) -> None:
        targets, (at, *numbers) = operands[: len(refs)], operands[len(refs) :]
        i32 = ir.IntegerType.get_signless(32)
        for place, pair in np.ndenumerate(at.registers):
            for i in range(2):
                offset = element(pair, i)
                inside = arith.cmpi(arith.CmpIPredicate.sge, offset, utils.c(0, i32))
                with utils.when(inside):
                    for ref, array in zip(targets, numbers, strict=True):
                        _store(ref, offset, element(array.registers[place], i))

    stores(*refs, places, *arrays)


def _store(ref: ir.Value, offset: ir.Value, number: ir.Value) -> None:
    kind = ref_dtype(ref)
    if isinstance(number.type, ir.IntegerType) and number.type != kind:
        number = arith.trunci(kind, number)
    llvm.store(number, utils.getelementptr(utils.memref_ptr(ref), [offset], kind))
