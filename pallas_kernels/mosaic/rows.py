"""Rows in global memory as matrices in registers (registers.LANES).

Each warp reads and writes rows of its own, `stride` rows from its neighbour's. With a stride of 0
all warps hold the same rows, or share out their columns. Warps that hold the same numbers take
turns when they store them. Like the operations of matrices.py these have two forms: instructions on
registers, and array operations, which the interpreter runs.
"""

# pyright: reportArgumentType=false
# the stubs of MLIR do not say how many results inline assembly has

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.registers import (
    LANES,
    SIDE,
    WARPS,
    element,
    fragment,
    grid,
    less,
    place_in_matrix,
    ref_dtype,
    twice,
    warp,
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The operations, in instructions or, if `interpret`, in array operations.

    parts: of the columns. Warp w has the (w mod parts)-th of them.
    """

    interpret: bool
    stride: int
    parts: int = 1

    def load(self, ref: Any, rows: int, skip: Any = None, start: Any = None) -> jax.Array:
        """Load [WARPS, rows, columns / parts] from [n, columns]. Rows from n on repeat the last
        one.

        Args:
            skip: a row that another program may write meanwhile. Another one is loaded in its
                place.
            start: the first row, if the array is a ring. Then the last row is followed by row 0.
        """
        count, columns = ref.shape[0], ref.shape[1] // self.parts
        shape = (WARPS, rows, columns)
        if self.interpret:
            return self._loaded(ref, rows, skip, start)
        reaches = self.stride * (WARPS - 1) + rows
        skips = [] if skip is None or count == 1 else [skip]
        starts = [] if start is None else [start]

        inline: Any = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len([*skips, *starts])),
            return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=LANES),
        )

        @inline
        def load(ctx: Any, ref: ir.Value, *scalars: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            i32, dtype = ir.IntegerType.get_signless(32), ref_dtype(ref)
            pair, n = ir.VectorType.get((2,), dtype), utils.c(count, i32)
            numbers = [scalar.registers.item() for scalar in scalars]
            registers = np.empty((-(-rows // SIDE), columns // SIDE), dtype=object)
            for i in range(len(registers)):
                row = self._row(i)
                if starts:
                    row = arith.addi(row, numbers[-1])
                    inside = arith.cmpi(arith.CmpIPredicate.slt, row, n)
                    row = arith.select(inside, row, arith.subi(row, n))
                if reaches > count or (starts and rows % SIDE):
                    row = arith.minsi(row, utils.c(count - 1, i32))
                for skip in numbers[: len(skips)]:
                    other = arith.extui(i32, _equal(skip, utils.c(0, i32)))
                    row = arith.select(_equal(row, skip), other, row)
                for j in range(columns // SIDE):
                    registers[i, j] = llvm.load(pair, self._pointer(ref, row, j, columns))
            return fragment(registers, shape, dtype)

        return load(ref, *skips, *starts)

    def _loaded(self, ref: Any, rows: int, skip: Any, start: Any) -> jax.Array:
        count, reach = ref.shape[0], self.stride * (WARPS - 1) + rows
        warps, in_warp = (lax.broadcasted_iota(jnp.int32, (WARPS, rows), i) for i in range(2))
        places = self.stride * warps + in_warp
        if start is not None:
            x = _of_ring(ref, reach, skip, start)[places]
        elif skip is None or count == 1:
            x = ref[...][jnp.minimum(places, count - 1)]
        else:
            every = [_row_but(ref, i, skip) for i in range(count)]
            x = jnp.concatenate(every)[jnp.minimum(places, count - 1)]
        columns = ref.shape[1] // self.parts
        of_warps = [(warp % self.parts) * columns for warp in range(WARPS)]
        return jnp.stack([x[w, :, at : at + columns] for w, at in enumerate(of_warps)])

    def store(self, ref: Any, x: jax.Array, rows: int | None = None) -> None:
        """Store the first `rows` rows (default: all) of [WARPS, rows, columns / parts] to [n,
        columns]."""
        rows = x.shape[1] if rows is None else rows
        if self.interpret:
            self._store_interpreted(ref, x, rows)
            return

        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES))

        @inline
        def store(ctx: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
            registers = grid(x)
            for i in range(-(-rows // SIDE)):
                with utils.when(self._stores(i, rows)):
                    for j in range(registers.shape[1]):
                        at = self._pointer(ref, self._row(i), j, x.shape[2])
                        llvm.store(registers[i, j], at)

        store(ref, x)

    def store_column(self, ref: Any, x: jax.Array) -> None:
        """Store the first column of [WARPS, rows, SIDE] to [n], neighbouring rows side by side."""
        if self.interpret:
            self._store_interpreted(ref, x[:, :, 0], x.shape[1])
            return

        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES))

        @inline
        def store(ctx: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
            first = less(place_in_matrix()[1], 0, equal=True)
            for i, register in enumerate(grid(x)[:, 0]):
                with utils.when(arith.andi(first, self._stores(i, x.shape[1]))):
                    pointer = utils.getelementptr(
                        utils.memref_ptr(ref), [self._row(i)], ref_dtype(ref)
                    )
                    llvm.store(element(register, 0), pointer)

        store(ref, x)

    def _store_interpreted(self, ref: Any, x: jax.Array, rows: int) -> None:
        for number in range(WARPS if self.stride else self.parts):
            of_rows = ref.at[pl.ds(self.stride * number, rows)]
            if self.parts > 1:
                of_rows = of_rows.at[:, pl.ds(number * x.shape[2], x.shape[2])]
            of_rows[...] = x[number, :rows]

    def _row(self, matrix: int) -> ir.Value:
        """Return the row of the i-th matrix that this lane holds."""
        i32 = ir.IntegerType.get_signless(32)
        row = arith.addi(place_in_matrix()[0], utils.c(SIDE * matrix, i32))
        if not self.stride:
            return row
        return arith.addi(row, arith.muli(warp(), utils.c(self.stride, i32)))

    def _stores(self, matrix: int, rows: int) -> ir.Value:
        """Return whether this lane stores its row of the i-th matrix."""
        yes = less(place_in_matrix()[0], rows - SIDE * matrix)
        if self.stride:
            return yes
        i32, alike = ir.IntegerType.get_signless(32), WARPS // self.parts
        turn = arith.divui(warp(), utils.c(self.parts, i32))
        return arith.andi(yes, less(turn, matrix % alike, equal=True))

    def _pointer(self, ref: ir.Value, row: ir.Value, matrix: int, columns: int) -> ir.Value:
        """Return the address of this lane's pair of numbers in a row, in the j-th matrix of its
        warp's columns."""
        i32 = ir.IntegerType.get_signless(32)
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        assert strides[1] == 1, "rows are contiguous"
        column = arith.addi(twice(place_in_matrix()[1]), utils.c(SIDE * matrix, i32))
        if self.parts > 1:
            part = arith.remui(warp(), utils.c(self.parts, i32))
            column = arith.addi(column, arith.muli(part, utils.c(columns, i32)))
        offset = arith.addi(arith.muli(row, utils.c(strides[0], i32)), column)
        return utils.getelementptr(utils.memref_ptr(ref), [offset], ref_dtype(ref))


def _of_ring(ref: Any, rows: int, skip: Any, start: Any) -> jax.Array:
    """Return rows of a ring from `start` on, in as few reads as may be, because the interpreter
    takes long for each."""
    count = ref.shape[0]
    skip = jnp.int32(-1) if skip is None else skip
    last, whole = start + rows - 1, start + rows <= count

    def slow() -> jax.Array:
        slots = [start + i for i in range(rows)]
        slots = [jnp.where(slot < count, slot, slot - count) for slot in slots]
        slots = [jnp.minimum(slot, count - 1) for slot in slots]
        return jnp.concatenate([_row_but(ref, slot, skip) for slot in slots])

    def but_the_last() -> jax.Array:
        x = ref[pl.ds(start, rows - 1)]
        return jnp.concatenate([x, x[-1:]])

    outside = whole & ((skip < start) | (skip > last))
    if rows > count:
        return slow()
    return lax.cond(
        outside,
        lambda: ref[pl.ds(start, rows)],
        lambda: lax.cond(whole & (skip == last), but_the_last, slow),
    )


def _row_but(ref: Any, row: Any, skip: Any) -> jax.Array:
    return ref[pl.ds(jnp.where(skip == row, jnp.where(skip == 0, 1, 0), row), 1)]


def _equal(one: ir.Value, other: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, one, other)
