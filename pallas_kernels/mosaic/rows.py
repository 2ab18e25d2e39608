"""Rows in global memory as matrices in registers (registers.LANES).

Each warp reads and writes rows of its own, `stride` rows from its neighbour's. With a stride of 0
all warps hold the same rows, and take turns when they store them. Like the operations of
matrices.py these have two forms: instructions on registers, and array operations, which the
interpreter runs.
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
    """The operations, in instructions or, if `interpret`, in array operations."""

    interpret: bool
    stride: int

    def load(self, ref: Any, rows: int, skip: Any = None) -> jax.Array:
        """Load [WARPS, rows, columns] from [n, columns]. Rows from n on repeat the last one.

        skip: a row that another program may write meanwhile. Another one is loaded in its place.
        """
        count, columns = ref.shape
        shape = (WARPS, rows, columns)
        if self.interpret:
            return self._loaded(ref, rows, skip)
        reaches = self.stride * (WARPS - 1) + rows
        skips = [] if skip is None or count == 1 else [skip]

        inline: Any = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(skips)),
            return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=LANES),
        )

        @inline
        def load(ctx: Any, ref: ir.Value, *skips: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            i32, dtype = ir.IntegerType.get_signless(32), ref_dtype(ref)
            pair = ir.VectorType.get((2,), dtype)
            registers = np.empty((-(-rows // SIDE), columns // SIDE), dtype=object)
            for i in range(len(registers)):
                row = self._row(i)
                if reaches > count:
                    row = arith.minsi(row, utils.c(count - 1, i32))
                for skip in (s.registers.item() for s in skips):
                    other = arith.extui(i32, _equal(skip, utils.c(0, i32)))
                    row = arith.select(_equal(row, skip), other, row)
                for j in range(columns // SIDE):
                    registers[i, j] = llvm.load(pair, _pointer(ref, row, j))
            return fragment(registers, shape, dtype)

        return load(ref, *skips)

    def _loaded(self, ref: Any, rows: int, skip: Any) -> jax.Array:
        count = ref.shape[0]
        warps, in_warp = (lax.broadcasted_iota(jnp.int32, (WARPS, rows), i) for i in range(2))
        places = jnp.minimum(self.stride * warps + in_warp, count - 1)
        if skip is None or count == 1:
            return ref[...][places]
        other = jnp.where(skip == 0, 1, 0)
        every = [ref[pl.ds(jnp.where(skip == i, other, i), 1)] for i in range(count)]
        return jnp.concatenate(every)[places]

    def store(self, ref: Any, x: jax.Array, rows: int | None = None) -> None:
        """Store the first `rows` rows (default: all) of [WARPS, rows, columns] to [n, columns]."""
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
                        llvm.store(registers[i, j], _pointer(ref, self._row(i), j))

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
        for number in range(WARPS if self.stride else 1):
            ref.at[pl.ds(self.stride * number, rows)][...] = x[number, :rows]

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
        return arith.andi(yes, less(warp(), matrix % WARPS, equal=True))


def _equal(one: ir.Value, other: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, one, other)


def _pointer(ref: ir.Value, row: ir.Value, matrix: int) -> ir.Value:
    """Return the address of this lane's pair of numbers in a row, in the j-th matrix."""
    i32 = ir.IntegerType.get_signless(32)
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    assert strides[1] == 1, "rows are contiguous"
    column = arith.addi(twice(place_in_matrix()[1]), utils.c(SIDE * matrix, i32))
    offset = arith.addi(arith.muli(row, utils.c(strides[0], i32)), column)
    return utils.getelementptr(utils.memref_ptr(ref), [offset], ref_dtype(ref))
