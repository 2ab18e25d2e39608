"""Scores in memory, which attention reads and keeps for outliers: [spans, R, SPAN] in fp32, of
which each span holds SPAN tokens with R query heads each, in this order.

So a lane's two neighbouring query heads of a token are one load or store of eight bytes.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# types are checked with JAX 0.10, whose Mosaic GPU is older, and MLIR's stubs lack some

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.matrices import Matrices
from pallas_kernels.mosaic.registers import (
    LANES,
    SIDE,
    WARPS,
    element,
    grid,
    less,
    place_in_matrix,
    twice,
    warp,
)
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.tiles.layout import SPAN


def load_spans(ref: Any, columns: int, interpret: bool) -> jax.Array:
    """Load scores [WARPS, SPAN, columns] from [WARPS, R, SPAN] in shared memory. Columns beyond R
    repeat the others."""
    shape, heads = (WARPS, SPAN, columns), ref.shape[1]
    if interpret:
        return jnp.tile(ref[...].reshape(WARPS, SPAN, heads), (1, 1, columns // heads))
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=LANES),
    )

    @inline
    def load(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        f32, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty((SPAN // SIDE, columns // SIDE), dtype=object)
        for (i, j), pointer, _ in _places(ref, registers.shape, heads):
            if heads == 1:
                number = llvm.load(f32, pointer, alignment=4)
                registers[i, j] = vector.broadcast(pair, number)
            else:
                registers[i, j] = llvm.load(pair, pointer, alignment=8)
        layout = LANES.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=None,
        )

    return load(ref)


def store_spans(ref: Any, scores: jax.Array, interpret: bool) -> None:
    """Store scores [WARPS, SPAN, columns] to [WARPS, R, SPAN] in global memory."""
    heads = ref.shape[1]
    if interpret:
        ref[...] = scores[:, :, :heads].reshape(WARPS, heads, SPAN)
        return
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LANES))

    @inline
    def store(ctx: Any, ref: ir.Value, scores: mgpu.FragmentedArray) -> None:
        registers = grid(scores)
        for (i, j), pointer, real in _places(ref, registers.shape, heads):
            if j * SIDE >= heads:
                continue
            number = element(registers[i, j], 0) if heads == 1 else registers[i, j]
            with utils.when(real):
                llvm.store(number, pointer, alignment=4 if heads == 1 else 8)

    store(ref, scores)


def _places(
    ref: ir.Value, shape: tuple[int, ...], heads: int
) -> Iterator[tuple[tuple[int, int], ir.Value, ir.Value]]:
    """Return, for each matrix of a fragment, the address of this lane's scores, and whether they
    are real ones."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
    base = utils.memref_ptr(ref)
    token, pair = place_in_matrix()
    column = twice(pair)
    of_warp = arith.muli(warp(), utils.c(stride, i32))
    for i, j in np.ndindex(*shape):
        head = arith.andi(arith.addi(column, utils.c(j * SIDE, i32)), utils.c(heads - 1, i32))
        of_token = arith.muli(arith.addi(token, utils.c(i * SIDE, i32)), utils.c(heads, i32))
        offset = arith.addi(of_warp, arith.addi(of_token, head))
        real = less(column, max(1, heads - j * SIDE))
        yield (i, j), utils.getelementptr(base, [offset], f32), real


@dataclasses.dataclass(frozen=True)
class WithOutliers:
    """Keys whose outliers have scores of their own, [B, k, spans, R, SPAN], which come with the
    tiles. `first` is the KV head of the first of them."""

    inner: Any
    added: jax.Array
    first: int

    @property
    def chunks(self) -> tuple[int, int]:
        return self.inner.chunks

    def query(self, q: jax.Array, stored: Sequence[jax.Array]) -> jax.Array:
        return self.inner.query(q, stored)

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return self.inner.constants(stored)

    def table(self, refs: Sequence[Any], ops: Matrices) -> Any:
        return self.inner.table(refs, ops)

    def opened(self, planes: Sequence[jax.Array], table: Any, ops: Matrices) -> Any:
        return self.inner.opened(planes, table, ops)

    def fixed(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return self.inner.fixed(stored)

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return [self.added, *self.inner.views(stored)]

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        shape = slots, tokens // SPAN, *arrays[0].shape[3:]
        inner = self.inner.buffers(arrays[1:], slots, tokens, ops)
        return [plgpu.SMEM(shape, jnp.float32), *inner]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        row, head = unit
        spans = pl.ds(lax.div(tokens.start, jnp.int32(SPAN)), tokens.size // SPAN)
        yield arrays[0].at[row, head - self.first, spans], buffers[0].at[slot]
        yield from self.inner.copies(arrays[1:], buffers[1:], unit, tokens, slot)

    def scores(
        self, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        scores = self.inner.scores(query, buffers[1:], stripe, ops)
        added = load_spans(buffers[0].at[stripe.slot, stripe.spans], scores.shape[2], ops.interpret)
        return scores + added
