"""Arithmetic on 8 x 8 matrices that a warp holds in registers: the unit of tensor cores, of
`ldmatrix` and of `movmatrix`.

Every array here is [WARPS, rows, columns], and each warp computes on its own entry of the first
axis, so no operation waits for another warp. One layout serves all of them. Lane 4 r + c of a warp
holds row r and columns 2 c and 2 c + 1 of each matrix, which is one 32-bit register for 16-bit
elements:

    operand                     array                   why this layout is the tensor core's
    A  [rows, summed]           codes                   "row": neighbours in the summed axis
    B  [columns, summed]        queries, weights        "col": the same, so B is stored transposed
    accumulators                scores, values          fp32 pairs of neighbouring columns

So codes of keys and values enter a product as they were unpacked, and scores become the weights of
the next product by `transposed`, without shared memory.

Each operation has two forms: PTX on registers, and array operations on the same values, which the
interpreter runs. Pallas' own `mma` has only the first form, and only layouts in which the four
warps share the rows of one product.
"""

# pyright: reportArgumentType=false
# the stubs of MLIR do not say how many results inline assembly has

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.mosaic.registers import (
    LANES,
    OF_ALL_WARPS,
    ROWS,
    SIDE,
    WARPS,
    asm,
    cast,
    code_registers,
    element,
    first_rows,
    fragment,
    grid,
    index,
    ldmatrix,
    less,
    matrices_in_columns,
    matrices_of_rows,
    mma,
    objects,
    place_in_matrix,
    ref_dtype,
    turned_pair,
    twice,
    vectors_of,
    warp,
)
from pallas_kernels.mosaic.swizzle import transforms_of
from pallas_kernels.tiles.layout import Field, PlaneLayout


def in_lanes(x: jax.Array) -> jax.Array:
    return plgpu.layout_cast(x, LANES)


def splat(shape: tuple[int, ...], value: float, dtype: Any = jnp.float32) -> jax.Array:
    return in_lanes(jnp.full(shape, value, dtype))


def on_rows(x: jax.Array, rows: int) -> jax.Array:
    """Repeat numbers [WARPS, columns] on `rows` rows."""
    return in_lanes(lax.broadcast_in_dim(x, (WARPS, rows, x.shape[1]), (0, 2)))


def on_warps(x: jax.Array) -> jax.Array:
    """Repeat a matrix [rows, columns] on all warps."""
    return in_lanes(lax.broadcast_in_dim(x, (WARPS, *x.shape), (1, 2)))


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The operations, in PTX or, if `interpret`, in array operations. `swizzled`: so are the rows
    of `buffer` (swizzle.py)."""

    interpret: bool
    swizzled: bool = False

    def buffer(self, slots: int, rows: int, columns: int, dtype: Any) -> Any:
        """Return the shared memory of `slots` tiles [rows, columns] of 16-bit numbers."""
        assert rows % SIDE == 0, "each tile begins where the exchange of parts does"
        transforms = transforms_of(columns) if self.swizzled else ()
        return plgpu.SMEM((slots, rows, columns), dtype, transforms=transforms)

    def load_tile(self, ref: Any, rows: int, dtype: Any, transposed: bool = False) -> jax.Array:
        """Load 16-bit numbers [WARPS, rows, columns] from rows [WARPS * rows, columns] of a tile of
        a `buffer`, or the transpose of each warp's. The bits of `dtype` may be stored as
        integers."""
        shape = (WARPS, rows, ref.shape[1])
        shape = _swapped(shape) if transposed else shape
        if self.interpret:
            x = lax.bitcast_convert_type(ref[...], dtype).reshape(WARPS, rows, -1)
            return jnp.swapaxes(x, 1, 2) if transposed else x

        transforms = transforms_of(ref.shape[1]) if self.swizzled else ()

        @_inline((plgpu.RefType(transforms),), shape, dtype)
        def matrices(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            kind = utils.dtype_to_ir_type(dtype)
            places = matrices_of_rows(ref, rows, self.swizzled)
            registers = cast(ldmatrix(ref, places, transposed), kind)
            registers = registers.reshape(rows // SIDE, -1)
            return fragment(registers.T if transposed else registers, shape, kind)

        return matrices(ref)

    def load_rows(self, ref: Any, rows: int) -> jax.Array:
        """Load 16-bit floats [WARPS, columns] as fp16 [WARPS, rows, columns] with equal rows.
        Neighbouring warps may share an entry of the first axis."""
        shape = (WARPS, rows, ref.shape[1])
        if self.interpret:
            return jnp.broadcast_to(_of_warps(ref)[:, None], shape)

        @_inline((plgpu.RefType(),), shape, jnp.float16)
        def equal_rows(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            # Repeated by the load, so that four registers in a row are a product's operand.
            places = vectors_of(ref, rows // SIDE)
            registers = cast(ldmatrix(ref, places, False), ir.F16Type.get())
            return fragment(registers.reshape(-1, rows // SIDE).T, shape, ir.F16Type.get())

        return equal_rows(ref)

    def load_columns(self, ref: Any, columns: int, dtype: Any = jnp.float32) -> jax.Array:
        """Load 16-bit floats [WARPS, rows] as fp32 or fp16 [WARPS, rows, columns] with equal
        columns. Neighbouring warps may share an entry of the first axis.

        A transposing load of eight equal rows gives each lane its row's number in both halves of
        the register.
        """
        shape = (WARPS, ref.shape[1], columns)
        if self.interpret:
            return jnp.broadcast_to(_of_warps(ref).astype(dtype)[:, :, None], shape)

        @_inline((plgpu.RefType(),), shape, dtype)
        def equal_columns(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            pairs = cast(ldmatrix(ref, vectors_of(ref), True), ir.F16Type.get())
            kind = utils.dtype_to_ir_type(dtype)
            registers = np.empty((len(pairs), columns // SIDE), dtype=object)
            for i, pair in enumerate(pairs):
                if dtype == jnp.float32:
                    number = arith.extf(kind, element(pair, 0))
                    pair = vector.broadcast(ir.VectorType.get((2,), kind), number)
                registers[i, :] = pair
            return fragment(registers, shape, kind)

        return equal_columns(ref)

    def load_matrices(self, ref: Any) -> jax.Array:
        """Load 16-bit numbers [WARPS, rows, columns], the same for every warp, from [columns /
        SIDE, rows, SIDE] in shared memory."""
        matrices, rows, _ = ref.shape
        shape = (WARPS, rows, matrices * SIDE)
        if self.interpret:
            return jnp.broadcast_to(jnp.swapaxes(ref[...], 0, 1).reshape(shape[1:]), shape)

        @_inline((plgpu.RefType(),), shape, ref.dtype)
        def same_matrices(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            registers = ldmatrix(ref, matrices_in_columns(ref), False)
            return fragment(registers.reshape(rows // SIDE, -1), shape, ref_dtype(ref))

        return same_matrices(ref)

    def turned(
        self,
        first: jax.Array,
        second: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        back: bool = False,
    ) -> list[jax.Array]:
        """Return (first cos - second sin, second cos + first sin) in fp16, or with the other signs
        if `back`."""
        if self.interpret:
            sin = -sin if back else sin
            return [first * cos - second * sin, second * cos + first * sin]
        shape = first.shape
        call: Any = plgpu.inline_mgpu(
            arg_types=(LANES,) * 4,
            return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=LANES)] * 2,
        )

        @call
        def turned(ctx: Any, *arrays: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
            results = [np.empty(arrays[0].registers.shape, dtype=object) for _ in range(2)]
            for place in np.ndindex(results[0].shape):
                pairs = turned_pair(*(array.registers[place] for array in arrays), back=back)
                for result, pair in zip(results, pairs, strict=True):
                    result[place] = pair
            return [fragment(result, shape, ir.F16Type.get()) for result in results]

        return turned(first, second, cos, sin)

    def codes(
        self, words: Sequence[jax.Array], layout: PlaneLayout, chunk: int, tokens: int
    ) -> jax.Array:
        """Return bias + code of a chunk of channels as fp16, for the tokens of a span in order.

        Args:
            words: of each plane set, [WARPS, tokens, words] or its transpose.
            layout: of the words.
            chunk: of channels.
            tokens: the axis of the tokens, 1 or 2.
        """
        fields = [layout.field(slot, chunk) for slot in range(layout.slots)]
        shape = list(words[0].shape)
        shape[tokens] *= layout.slots
        shape[3 - tokens] = layout.width
        if self.interpret:
            return jnp.concatenate(
                [code_numbers(words, field, layout.width, 3 - tokens) for field in fields], tokens
            )

        @_inline((LANES,) * len(words), tuple(shape), jnp.float16)
        def codes(ctx: Any, *words: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            grids = [grid(w) for w in words]
            slots = [code_registers(grids, field, layout.width, 3 - tokens) for field in fields]
            return fragment(np.concatenate(slots, tokens - 1), tuple(shape), ir.F16Type.get())

        return codes(*words)

    def constants(self, values: Sequence[float]) -> jax.Array:
        """Return fp16 [WARPS, ROWS, SIDE * len(values)] with one number for SIDE columns."""
        shape = (WARPS, ROWS, SIDE * len(values))
        if len(set(values)) == 1:
            return splat(shape, values[0], jnp.float16)
        if self.interpret:
            columns = [jnp.full((*shape[:2], SIDE), value, jnp.float16) for value in values]
            return jnp.concatenate(columns, 2)

        @_inline((), shape, jnp.float16)
        def constants(ctx: Any) -> mgpu.FragmentedArray:
            f16 = ir.F16Type.get()
            pair = ir.VectorType.get((2,), f16)
            registers = [vector.broadcast(pair, utils.c(value, f16)) for value in values]
            return fragment(first_rows(objects(registers)[None], ROWS), shape, f16)

        return constants()

    def product(self, start: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return start + a b^T of each warp in fp32, for a [WARPS, rows, k] and b [WARPS, columns,
        k], both in fp16 or in bfloat16. `start` may have fewer rows, which then repeat.
        """
        shape = (WARPS, a.shape[1], b.shape[1])
        if self.interpret:
            start = jnp.tile(start, (1, shape[1] // start.shape[1], 1))
            return start + jnp.einsum("wmk,wnk->wmn", a, b, preferred_element_type=jnp.float32)

        @_inline((LANES,) * 3, shape, jnp.float32)
        def product(ctx: Any, start: Any, a: Any, b: Any) -> mgpu.FragmentedArray:
            sums, a, b = first_rows(grid(start), shape[1]), grid(a), grid(b)
            for k in range(0, a.shape[1], 2):
                for i, j in itertools.product(range(0, len(a), 2), range(len(b))):
                    half = slice(i, i + 2)
                    rows = [*a[half, k], *a[half, k + 1]]
                    sums[half, j] = mma(sums[half, j], rows, list(b[j, k : k + 2]))
            return fragment(sums, shape, ir.F32Type.get())

        return product(start, a, b)

    def transposed(self, x: jax.Array) -> jax.Array:
        """Return 16-bit numbers [WARPS, columns, rows]."""
        shape = _swapped(x.shape)
        if self.interpret:
            return jnp.swapaxes(x, 1, 2)

        @_inline((LANES,), shape, x.dtype)
        def transposed(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            i32 = ir.IntegerType.get_signless(32)
            form = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            moved = [asm(form, utils.bitcast(register, i32)) for register in grid(x).flatten()]
            registers = cast(moved, x.mlir_dtype).reshape(grid(x).shape)
            return fragment(registers.T, shape, x.mlir_dtype)

        return transposed(x)

    def stacked(self, parts: Sequence[jax.Array], rows: int) -> jax.Array:
        """Return [WARPS, rows, columns]: an equal share of the rows for each part, whose rows
        repeat."""
        shape, dtype = (WARPS, rows, parts[0].shape[2]), parts[0].dtype
        if len(parts) == 1 and parts[0].shape == shape:
            return parts[0]
        share = rows // len(parts)
        if self.interpret:
            repeated = [jnp.tile(part, (1, -(-share // part.shape[1]), 1)) for part in parts]
            return jnp.concatenate([part[:, :share] for part in repeated], 1)

        @_inline((LANES,) * len(parts), shape, dtype)
        def stacked(ctx: Any, *parts: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            grids = [first_rows(grid(part), share) for part in parts]
            return fragment(np.concatenate(grids), shape, parts[0].mlir_dtype)

        return stacked(*parts)

    def store(self, ref: Any, x: jax.Array) -> None:
        """Store the first rows and columns of [rows, columns], the same in every warp, as many as
        `ref` in global memory has."""
        rows, columns = ref.shape
        if self.interpret:
            ref[...] = x[:rows, :columns]
            return

        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), OF_ALL_WARPS))

        @inline
        def store(ctx: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
            row, pair = place_in_matrix()
            registers = x.registers.reshape(x.shape[0] // SIDE, x.shape[1] // SIDE)
            for (i, j), register in np.ndenumerate(registers):
                if i * SIDE >= rows or j * SIDE >= columns:
                    continue
                # The warps take turns, as all of them have the numbers.
                stores = less(warp(), i % WARPS, equal=True)
                if rows % SIDE:
                    stores = arith.andi(stores, less(row, rows - i * SIDE))
                if columns % SIDE:
                    stores = arith.andi(stores, less(pair, max(1, columns // 2)))
                with utils.when(stores):
                    at = [index(row, i * SIDE), index(twice(pair), j * SIDE)]
                    if columns == 1:
                        memref.store(element(register, 0), ref, at)
                    else:
                        vector.store(register, ref, at)

        store(ref, x)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1]


def code_numbers(words: Sequence[jax.Array], field: Field, width: int, axis: int) -> jax.Array:
    """Return bias + code of a field of interpreted words, fp16. `axis` is the channels'."""

    def bits(tile: int, shift: int, mask: int, of_set: int) -> jax.Array:
        tile_words = lax.slice_in_dim(words[of_set], tile * width, (tile + 1) * width, axis=axis)
        wide = lax.bitcast_convert_type(tile_words, jnp.uint16).astype(jnp.uint32)
        moved = wide >> np.uint32(shift) if shift > 0 else wide << np.uint32(-shift)
        return moved & np.uint32(mask)

    number = np.uint32(field.exponent) | bits(field.tile, field.shift, field.mask, 0)
    if field.high_tile is not None:
        number |= bits(field.high_tile, field.high_shift, field.high_mask, 1)
    return lax.bitcast_convert_type(number.astype(jnp.uint16), jnp.float16)


def _inline(layouts_or_refs: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Inline a function on registers that returns one array [WARPS, rows, columns]."""
    return plgpu.inline_mgpu(
        arg_types=tuple(layouts_or_refs),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=LANES),
    )


def _of_warps(ref: Any) -> jax.Array:
    """Return the floats [WARPS, n] of entries that neighbouring warps may share."""
    return jnp.repeat(_half(ref[...]), WARPS // ref.shape[0], axis=0)


def _half(x: jax.Array) -> jax.Array:
    """Return the floats whose bits uint16 holds."""
    return lax.bitcast_convert_type(x, jnp.float16) if x.dtype == jnp.uint16 else x
