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

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from pallas_kernels.tiles.layout import Field, PlaneLayout

WARPS = 4  # of a block: Mosaic GPU computes in warpgroups
SIDE = 8  # rows and columns of a matrix
ROWS = 2 * SIDE  # of a tensor core's product

# [WARPS, rows, columns]: the first axis over warps, rows over groups of four lanes.
LANES = plgpu.Layout.TILED(
    fragmented_array.Tiling(((WARPS, SIDE, SIDE), (2,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Without one of the axes: the same in every warp, or in every row of a warp.
OF_ALL_WARPS, OF_ALL_ROWS = LANES.reduce(0), LANES.reduce(1)


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
    """The operations, in PTX or, if `interpret`, in array operations."""

    interpret: bool

    def load(self, ref: Any, transposed: bool = False) -> jax.Array:
        """Load 16-bit numbers [WARPS, rows, columns] from shared memory, or the transpose of each
        warp's."""
        shape = _swapped(ref.shape) if transposed else ref.shape
        if self.interpret:
            return jnp.swapaxes(ref[...], 1, 2) if transposed else ref[...]

        @_inline((plgpu.RefType(),), shape, ref.dtype)
        def matrices(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            grid = _matrices_of(ref)
            registers = _ldmatrix(ref, grid, transposed)
            rows, columns = (size // SIDE for size in ir.MemRefType(ref.type).shape[1:])
            registers = registers.reshape(rows, columns)
            return _fragment(registers.T if transposed else registers, shape, ref_dtype(ref))

        return matrices(ref)

    def load_rows(self, ref: Any, rows: int) -> jax.Array:
        """Load 16-bit floats [WARPS, columns] as fp16 [WARPS, rows, columns] with equal rows."""
        shape = (WARPS, rows, ref.shape[1])
        if self.interpret:
            return jnp.broadcast_to(_half(ref[...])[:, None], shape)

        @_inline((plgpu.RefType(),), shape, jnp.float16)
        def equal_rows(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            # Repeated by the load, so that four registers in a row are a product's operand.
            places = _vectors_of(ref, rows // SIDE)
            registers = _cast(_ldmatrix(ref, places, False), ir.F16Type.get())
            return _fragment(registers.reshape(-1, rows // SIDE).T, shape, ir.F16Type.get())

        return equal_rows(ref)

    def load_columns(self, ref: Any, columns: int) -> jax.Array:
        """Load 16-bit floats [WARPS, rows] as fp32 [WARPS, rows, columns] with equal columns.

        A transposing load of eight equal rows gives each lane its row's number in both halves of
        the register.
        """
        shape = (WARPS, ref.shape[1], columns)
        if self.interpret:
            return jnp.broadcast_to(_half(ref[...]).astype(jnp.float32)[:, :, None], shape)

        @_inline((plgpu.RefType(),), shape, jnp.float32)
        def equal_columns(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
            pairs = _cast(_ldmatrix(ref, _vectors_of(ref), True), ir.F16Type.get())
            f32 = ir.F32Type.get()
            registers = np.empty((len(pairs), columns // SIDE), dtype=object)
            for i, pair in enumerate(pairs):
                number = arith.extf(f32, _element(pair, 0))
                registers[i, :] = vector.broadcast(ir.VectorType.get((2,), f32), number)
            return _fragment(registers, shape, f32)

        return equal_columns(ref)

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
                [_code_numbers(words, field, layout.width, 3 - tokens) for field in fields], tokens
            )

        @_inline((LANES,) * len(words), tuple(shape), jnp.float16)
        def codes(ctx: Any, *words: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            grids = [_grid(w) for w in words]
            slots = [_code_registers(grids, field, layout.width, 3 - tokens) for field in fields]
            return _fragment(np.concatenate(slots, tokens - 1), tuple(shape), ir.F16Type.get())

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
            return _fragment(_first_rows(_objects(registers)[None], ROWS), shape, f16)

        return constants()

    def product(self, start: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return start + a b^T of each warp in fp32, for a [WARPS, rows, k] and b [WARPS, columns,
        k] in fp16. `start` may have fewer rows, which then repeat.
        """
        shape = (WARPS, a.shape[1], b.shape[1])
        if self.interpret:
            start = jnp.tile(start, (1, shape[1] // start.shape[1], 1))
            return start + jnp.einsum("wmk,wnk->wmn", a, b, preferred_element_type=jnp.float32)

        @_inline((LANES,) * 3, shape, jnp.float32)
        def product(ctx: Any, start: Any, a: Any, b: Any) -> mgpu.FragmentedArray:
            sums, a, b = _first_rows(_grid(start), shape[1]), _grid(a), _grid(b)
            for k in range(0, a.shape[1], 2):
                for i, j in itertools.product(range(0, len(a), 2), range(len(b))):
                    half = slice(i, i + 2)
                    rows = [*a[half, k], *a[half, k + 1]]
                    sums[half, j] = _mma(sums[half, j], rows, list(b[j, k : k + 2]))
            return _fragment(sums, shape, ir.F32Type.get())

        return product(start, a, b)

    def transposed(self, x: jax.Array) -> jax.Array:
        """Return fp16 [WARPS, columns, rows]."""
        shape = _swapped(x.shape)
        if self.interpret:
            return jnp.swapaxes(x, 1, 2)

        @_inline((LANES,), shape, jnp.float16)
        def transposed(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            i32 = ir.IntegerType.get_signless(32)
            asm = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            moved = [
                llvm.inline_asm(i32, [utils.bitcast(register, i32)], asm, "=r,r")
                for register in _grid(x).flatten()
            ]
            registers = _cast(moved, ir.F16Type.get()).reshape(_grid(x).shape)
            return _fragment(registers.T, shape, ir.F16Type.get())

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
            grids = [_first_rows(_grid(part), share) for part in parts]
            return _fragment(np.concatenate(grids), shape, parts[0].mlir_dtype)

        return stacked(*parts)

    def store(self, ref: Any, x: jax.Array) -> None:
        """Store the first rows and columns of [rows, columns], the same in every warp, as many as
        `ref` in global memory has."""
        rows, columns = ref.shape
        if self.interpret:
            ref[...] = x[:rows, :columns]
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), OF_ALL_WARPS))
        def store(ctx: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
            row, pair = _place_in_matrix()
            grid = x.registers.reshape(x.shape[0] // SIDE, x.shape[1] // SIDE)
            for (i, j), register in np.ndenumerate(grid):
                if i * SIDE >= rows or j * SIDE >= columns:
                    continue
                # The warps take turns, as all of them have the numbers.
                stores = _less(_warp(), i % WARPS, equal=True)
                if rows % SIDE:
                    stores = arith.andi(stores, _less(row, rows - i * SIDE))
                if columns % SIDE:
                    stores = arith.andi(stores, _less(pair, max(1, columns // 2)))
                with utils.when(stores):
                    at = [_index(row, i * SIDE), _index(_twice(pair), j * SIDE)]
                    if columns == 1:
                        memref.store(_element(register, 0), ref, at)
                    else:
                        vector.store(register, ref, at)

        store(ref, x)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1]


def _code_numbers(words: Sequence[jax.Array], field: Field, width: int, axis: int) -> jax.Array:
    def bits(tile: int, shift: int, mask: int, of_set: int) -> jax.Array:
        tile_words = lax.slice_in_dim(words[of_set], tile * width, (tile + 1) * width, axis=axis)
        wide = lax.bitcast_convert_type(tile_words, jnp.uint16).astype(jnp.uint32)
        moved = wide >> np.uint32(shift) if shift > 0 else wide << np.uint32(-shift)
        return moved & np.uint32(mask)

    number = np.uint32(field.exponent) | bits(field.tile, field.shift, field.mask, 0)
    if field.high_tile is not None:
        number |= bits(field.high_tile, field.high_shift, field.high_mask, 1)
    return lax.bitcast_convert_type(number.astype(jnp.uint16), jnp.float16)


def _code_registers(grids: Sequence[np.ndarray], field: Field, width: int, axis: int) -> np.ndarray:
    """Return the registers of one field. One `lop3` makes two numbers, and one more for a bit in a
    second plane set. Compilers share the shifts of fields that need the same one."""
    i32 = ir.IntegerType.get_signless(32)

    def tile(of_set: int, number: int) -> np.ndarray:
        places = range(number * width // SIDE, (number + 1) * width // SIDE)
        return np.take(grids[of_set], places, axis - 1)

    def moved(words: ir.Value, shift: int) -> ir.Value:
        words = utils.bitcast(words, i32)
        if shift == 0:
            return words
        move = arith.shrui if shift > 0 else arith.shli
        return move(words, utils.c(abs(shift), i32))

    def masked(words: ir.Value, mask: int, rest: str, *more: ir.Value) -> ir.Value:
        # The mask removes bits that cross from one half of the register into the other.
        asm = f"lop3.b32 $0, $1, {mask * PAIR:#x}, {rest}, 0xea;"
        return llvm.inline_asm(i32, [words, *more], asm, ",".join(["=r", "r", *["r"] * len(more)]))

    def number(words: ir.Value) -> ir.Value:
        if field.mask == 0xFF and field.shift in (0, 8) and field.position == 0:
            byte = field.shift // 8  # of each word, below the byte of the exponent
            selector = 0x4 << 12 | (2 + byte) << 8 | 0x4 << 4 | byte
            asm = f"prmt.b32 $0, $1, {field.exponent * PAIR:#x}, {selector:#x};"
            asm = asm.replace(
                f"{field.exponent * PAIR:#x}", f"{(field.exponent >> 8) * 0x1010101:#x}"
            )
            return llvm.inline_asm(i32, [utils.bitcast(words, i32)], asm, "=r,r")
        return masked(moved(words, field.shift), field.mask, f"{field.exponent * PAIR:#x}")

    low = tile(0, field.tile)
    high = None if field.high_tile is None else tile(1, field.high_tile)
    registers = np.empty(low.shape, dtype=object)
    for place, words in np.ndenumerate(low):
        bits = number(words)
        if high is not None:
            bits = masked(moved(high[place], field.high_shift), field.high_mask, "$2", bits)
        registers[place] = utils.bitcast(bits, ir.VectorType.get((2,), ir.F16Type.get()))
    return registers


PAIR = 0x10001  # times 16 bits: the same in both halves of a register


def _inline(layouts_or_refs: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Inline a function on registers that returns one array [WARPS, rows, columns]."""
    return plgpu.inline_mgpu(
        arg_types=tuple(layouts_or_refs),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=LANES),
    )


def _half(x: jax.Array) -> jax.Array:
    """Return the floats whose bits uint16 holds."""
    return lax.bitcast_convert_type(x, jnp.float16) if x.dtype == jnp.uint16 else x


def _cast(registers: Iterable[ir.Value], dtype: ir.Type) -> np.ndarray:
    """Name the two numbers in each register."""
    pair = ir.VectorType.get((2,), dtype)
    return _objects([utils.bitcast(register, pair) for register in registers])


def ref_dtype(ref: ir.Value) -> ir.Type:
    return ir.MemRefType(ref.type).element_type


def _grid(array: mgpu.FragmentedArray) -> np.ndarray:
    """Return the registers by matrix, [rows / SIDE, columns / SIDE]."""
    return array.registers.reshape(array.shape[1] // SIDE, array.shape[2] // SIDE).copy()


def _fragment(grid: np.ndarray, shape: tuple[int, ...], dtype: ir.Type) -> mgpu.FragmentedArray:
    layout = LANES.to_mgpu()
    signed = True if isinstance(dtype, ir.IntegerType) else None
    registers = grid.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _first_rows(grid: np.ndarray, rows: int) -> np.ndarray:
    """Return the registers of the first rows of an array that repeats."""
    return np.tile(grid, (-(-rows // SIDE // len(grid)), 1))[: rows // SIDE]


def _objects(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _element(vector_of_two: ir.Value, place: int) -> ir.Value:
    position = ir.DenseI64ArrayAttr.get([place])
    return vector.extract(vector_of_two, dynamic_position=[], static_position=position)


def _lane() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(utils.thread_idx(), utils.c(32, i32))


def _warp() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.divui(utils.thread_idx(), utils.c(32, i32))


def _place_in_matrix() -> tuple[ir.Value, ir.Value]:
    """Return the row and the pair of columns that this lane holds."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.divui(_lane(), utils.c(4, i32)), arith.remui(_lane(), utils.c(4, i32))


def _less(value: ir.Value, bound: int, equal: bool = False) -> ir.Value:
    predicate = arith.CmpIPredicate.eq if equal else arith.CmpIPredicate.ult
    return arith.cmpi(predicate, value, utils.c(bound, value.type))


def _twice(value: ir.Value) -> ir.Value:
    return arith.addi(value, value)


def _index(value: ir.Value, offset: int) -> ir.Value:
    moved = arith.addi(value, utils.c(offset, value.type))
    return arith.index_castui(ir.IndexType.get(), moved)


@dataclasses.dataclass(frozen=True)
class _Places:
    """The addresses of matrices in shared memory, in elements from a warp's own.

    Args:
        matrices: the first element of each matrix.
        row: elements between the rows of a matrix; 0 repeats its first row.
        warp: elements between neighbouring warps.
    """

    matrices: tuple[int, ...]
    row: int
    warp: int


def _matrices_of(ref: ir.Value) -> _Places:
    kind = ir.MemRefType(ref.type)
    (_, rows, columns), (warp, row, column) = kind.shape, kind.get_strides_and_offset()[0]
    assert column == 1, "rows are contiguous"
    starts = [SIDE * (row * i + j) for i in range(rows // SIDE) for j in range(columns // SIDE)]
    return _Places(tuple(starts), row, warp)


def _vectors_of(ref: ir.Value, times: int = 1) -> _Places:
    kind = ir.MemRefType(ref.type)
    (_, size), (warp, element) = kind.shape, kind.get_strides_and_offset()[0]
    assert element == 1, "vectors are contiguous"
    return _Places(tuple(i for i in range(0, size, SIDE) for _ in range(times)), 0, warp)


def _ldmatrix(ref: ir.Value, places: _Places, transposed: bool) -> np.ndarray:
    """Load matrices, four at a time if there are so many: lanes 8 i .. 8 i + 7 address the rows of
    the i-th of them."""
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ref_dtype(ref))
    base = utils.memref_ptr(ref)
    row = arith.remui(_lane(), utils.c(SIDE, i32))
    octet = arith.divui(_lane(), utils.c(SIDE, i32))
    of_warp = arith.addi(
        arith.muli(_warp(), utils.c(places.warp, i32)), arith.muli(row, utils.c(places.row, i32))
    )
    layout = nvvm.MMALayout.col if transposed else nvvm.MMALayout.row
    square = ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8,n=8>")
    loaded: list[ir.Value] = []
    for starts in _batches(places.matrices, 4):
        offset = of_warp
        for bit, of_bit in enumerate(_bits_of_steps(starts)):
            chosen = arith.andi(octet, utils.c(1 << bit, i32))
            step = arith.muli(arith.shrui(chosen, utils.c(bit, i32)), utils.c(of_bit, i32))
            offset = arith.addi(offset, step)
        offset = arith.addi(offset, utils.c(starts[0], i32))
        pointer = utils.getelementptr(base, [offset], ref_dtype(ref))
        value = nvvm.ldmatrix(
            pointer,
            layout=layout,
            num=len(starts),
            shape=square,
            elt_type=nvvm.LdStMatrixEltType.B16,
        )
        parts = (
            [value]
            if len(starts) == 1
            else [llvm.extractvalue(i32, value, [i]) for i in range(len(starts))]
        )
        loaded += [utils.bitcast(part, pair) for part in parts]
    return _objects(loaded)


def _batches(starts: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    size = next(size for size in (most, most // 2, 1) if len(starts) % size == 0)
    return (starts[i : i + size] for i in range(0, len(starts), size))


def _bits_of_steps(starts: Sequence[int]) -> list[int]:
    """Return how far the first and the second bit of a matrix's number move its start."""
    steps = [starts[1 << bit] - starts[0] for bit in range(len(starts).bit_length() - 1)]
    assert len(starts) < 4 or starts[3] - starts[0] == sum(steps)
    return steps


def _mma(sums: np.ndarray, a: Sequence[ir.Value], b: Sequence[ir.Value]) -> np.ndarray:
    """Return the two registers of 16 x 8 sums plus the product of 16 x 16 and 16 x 8 numbers."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    numbers = [_element(pair, place) for pair in sums for place in range(2)]
    operands = [utils.bitcast(register, i32) for register in (*a, *b)]
    value = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*operands, *numbers],
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
    )
    results = [llvm.extractvalue(f32, value, [i]) for i in range(4)]
    pair = ir.VectorType.get((2,), f32)
    return _objects([vector.from_elements(pair, results[i : i + 2]) for i in (0, 2)])
