"""Slots of outliers, as warps read them: each warp a pool of a span of tokens (the layout is in
readers/sparse_outliers.py).

A step takes STEP slots of a head. They are the columns of 8 x 8 matrices whose rows all repeat the
same, so that sums over slots are products of tensor cores with one-hot matrices, without atomics.
Results do not depend on the order of threads.

Numbers are gathered from global memory, of which a block reads few and the same again: its cache
holds them. Like the operations of matrices.py, a gather has two forms: instructions on registers,
and array operations, which the interpreter runs.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# types are checked with JAX 0.10, whose Mosaic GPU is older, and MLIR's stubs lack some

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

from pallas_kernels.mosaic.matrices import splat
from pallas_kernels.mosaic.registers import LANES, ROWS, SIDE, WARPS, element, ref_dtype
from pallas_kernels.tiles.layout import SPAN

STEP = ROWS  # slots: as many as a tensor core's product sums
_GLOBAL = 1  # address space of global memory


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LANES)


def by_warp(numbers: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    """Return an array that holds in each warp its own one of these int32 numbers."""
    warps, chosen = iota(shape, 0), splat(shape, 0, jnp.int32)
    for warp, number in enumerate(numbers):
        chosen = jnp.where(warps == warp, number, chosen)
    return chosen


def gathered(
    ref: Any,
    places: jax.Array,
    dtype: Any,
    interpret: bool,
    *,
    width: int = 1,
    together: bool = False,
) -> list[jax.Array]:
    """Return `width` neighbours of each place of an array in global memory, an array for each.

    Args:
        ref: read as if it were flat. 16 bits become int32, or the fp16 whose bits they are.
        places: int32 [WARPS, rows, columns], multiples of the width, all inside.
        dtype: of the result.
        width: a power of two.
        together: places of two neighbouring columns are neighbours, the first of them even.
    """
    shape = places.shape
    if interpret:
        flat = _as_dtype(ref[...].reshape(-1), dtype)
        if together:
            first = places[..., ::2]
            return [jnp.stack([flat[first], flat[first + 1]], axis=-1).reshape(shape)]
        return [flat[places + i] for i in range(width)]
    returned = plgpu.ShapeDtypeStruct(shape, dtype, layout=LANES)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LANES), return_type=[returned] * width
    )

    @inline
    def gather(ctx: Any, ref: ir.Value, places: mgpu.FragmentedArray) -> Any:
        stored, wanted = ref_dtype(ref), utils.dtype_to_ir_type(dtype)
        widened = isinstance(wanted, ir.IntegerType) and wanted.width > stored.width
        kind = stored if widened else wanted
        pointer = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), utils.memref_ptr(ref))
        each = 2 if together else width

        def load(place: ir.Value) -> list[Any]:
            at = utils.getelementptr(pointer, [place], stored)
            alignment = each * utils.bytewidth(kind)
            if each == 1:
                numbers = [llvm.load(kind, at, alignment=alignment)]
            else:
                both = llvm.load(ir.VectorType.get((each,), kind), at, alignment=alignment)
                numbers = [element(both, i) for i in range(each)]
            return [arith.extui(wanted, x) if widened else x for x in numbers]

        arrays = [np.empty(places.registers.shape, dtype=object) for _ in range(width)]
        pair = ir.VectorType.get((2,), wanted)
        for at, register in np.ndenumerate(places.registers):
            if together:
                arrays[0][at] = vector.from_elements(pair, load(element(register, 0)))
                continue
            columns = [load(element(register, i)) for i in range(2)]
            for array, numbers in zip(arrays, zip(*columns, strict=True), strict=True):
                array[at] = vector.from_elements(pair, list(numbers))
        layout, signed = LANES.to_mgpu(), True if isinstance(wanted, ir.IntegerType) else None
        return [
            mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=signed)
            for array in arrays
        ]

    return list(gather(ref, places))


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == jnp.uint16 and dtype == jnp.float16:
        return lax.bitcast_convert_type(x, dtype)
    return x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """STEP slots for each warp, [WARPS, SIDE, STEP] with equal rows.

    used: they are slots of the head. Of others, the residual is 0.
    token: of the pool.
    residual: fp32.
    """

    used: jax.Array
    token: jax.Array
    channel: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Pools:
    """The slots of one row of a batch.

    index, residual, ends: refs of one row, [n, P] twice and [n, K].
    """

    index: Any
    residual: Any
    ends: Any
    channels: int
    interpret: bool

    def open(self, numbers: Sequence[Any], head: Any, counts: Sequence[Any]) -> OpenPools:
        """Return the slots of a head in a pool for each warp. `numbers`: of the pools, inside.
        `counts`: without it a pool has no slots, because none of its tokens counts. Its ends may
        then be anything."""
        begins, ends = [], []
        for number, counted in zip(numbers, counts, strict=True):
            end = self.ends[number, head].astype(jnp.int32)
            before = self.ends[number, jnp.maximum(head - 1, 0)].astype(jnp.int32)
            begins.append(jnp.where(counted & (head > 0), before, 0))
            ends.append(jnp.where(counted, end, 0))
        shape, bits = (WARPS, SIDE, STEP), (STEP - 1)
        # Steps begin at an even slot, of which two are loaded at once.
        firsts = [begin - (begin & bits) for begin in begins]
        longest = jnp.int32(0)
        for first, end in zip(firsts, ends, strict=True):
            longest = jnp.maximum(longest, end - first)
        of_row = self.index.shape[1]
        return OpenPools(
            self,
            pl.cdiv(longest, STEP),
            by_warp(firsts, shape) + iota(shape, 2),
            by_warp([number * of_row for number in numbers], shape),
            by_warp(begins, shape),
            by_warp(ends, shape),
        )


@dataclasses.dataclass(frozen=True)
class OpenPools:
    """The slots of a head in a pool for each warp. steps: until all are read."""

    pools: Pools
    steps: Any
    slots: jax.Array
    starts: jax.Array
    begins: jax.Array
    ends: jax.Array

    def step(self, number: Any) -> Step:
        of_pool, channels = self.pools.index.shape[1], self.pools.channels
        slot, even = self.slots + STEP * number, of_pool % 2 == 0
        used = (slot >= self.begins) & (slot < self.ends)
        inside = self.starts + jnp.minimum(slot, of_pool - (2 if even else 1))
        [place], [residual] = (
            gathered(ref, inside, dtype, self.pools.interpret, together=even)
            for ref, dtype in ((self.pools.index, jnp.int32), (self.pools.residual, jnp.float16))
        )
        token = (place >> (channels.bit_length() - 1)) & (SPAN - 1)
        residual = jnp.where(used, residual.astype(jnp.float32), 0.0)
        return Step(used, token, place & (channels - 1), residual)
