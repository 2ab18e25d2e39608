"""Registers that hold 8 x 8 matrices, and the instructions that load, multiply and unpack them.

`matrices` is made of these. Arrays of registers are [rows / SIDE, columns / SIDE], one register of
each lane for a matrix.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# the stubs of MLIR do not say how many results inline assembly has

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.tiles.layout import Field

WARPS = 4  # of a block: Mosaic GPU computes in warpgroups
SIDE = 8  # rows and columns of a matrix
ROWS = 2 * SIDE  # of a tensor core's product
PAIR = 0x10001  # times 16 bits: the same in both halves of a register
# The lowest bits of a 16-bit element's number that count parts of 16 bytes, and lines of 128.
_OF_PART, _OF_LINE = 3, 6

# [WARPS, rows, columns]: the first axis over warps, rows over groups of four lanes.
LANES = plgpu.Layout.TILED(
    fragmented_array.Tiling(((WARPS, SIDE, SIDE), (2,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Without one of the axes: the same in every warp, or in every row of a warp.
OF_ALL_WARPS, OF_ALL_ROWS = LANES.reduce(0), LANES.reduce(1)


def code_registers(grids: Sequence[np.ndarray], field: Field, width: int, axis: int) -> np.ndarray:
    """Return the registers of one field. One `lop3` makes two numbers, and one more for a bit in a
    second plane set. Compilers share the shifts of fields that need the same one."""
    i32 = ir.IntegerType.get_signless(32)

    def tile(of_set: int, number: int) -> np.ndarray:
        places = range(number * width // SIDE, (number + 1) * width // SIDE)
        return np.take(grids[of_set], places, axis - 1)

    def moved(words: Any, shift: int) -> ir.Value:
        words = utils.bitcast(words, i32)
        if shift == 0:
            return words
        move = arith.shrui if shift > 0 else arith.shli
        return move(words, utils.c(abs(shift), i32))

    def masked(words: Any, mask: int, rest: str, *more: ir.Value) -> ir.Value:
        # The mask removes bits that cross from one half of the register into the other.
        return asm(f"lop3.b32 $0, $1, {mask * PAIR:#x}, {rest}, 0xea;", words, *more)

    def number(words: Any) -> ir.Value:
        if field.mask == 0xFF and field.shift in (0, 8) and field.position == 0:
            byte = field.shift // 8  # of each word, below the byte of the exponent
            selector = 0x4 << 12 | (2 + byte) << 8 | 0x4 << 4 | byte
            form = f"prmt.b32 $0, $1, {field.exponent >> 8:#x}, {selector:#x};"
            return asm(form, utils.bitcast(words, i32))
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


def cast(registers: Iterable[ir.Value], dtype: ir.Type) -> np.ndarray:
    """Name the two numbers in each register."""
    pair = ir.VectorType.get((2,), dtype)
    return objects([utils.bitcast(register, pair) for register in registers])


def turned_pair(
    first: ir.Value, second: ir.Value, cos: ir.Value, sin: ir.Value, *, back: bool
) -> np.ndarray:
    """Return (first cos - second sin, second cos + first sin) of two fp16 numbers each, or with the
    other signs."""
    i32 = ir.IntegerType.get_signless(32)
    operands = [utils.bitcast(register, i32) for register in (first, second, cos, sin)]
    turned = []
    for one, other, minus in ((1, 2, not back), (2, 1, back)):
        sign = "neg.f16x2 t, t;" if minus else ""
        product = f"mul.rn.f16x2 t, ${other}, $4; {sign}"
        form = f"{{ .reg .b32 t; {product} fma.rn.f16x2 $0, ${one}, $3, t; }}"
        turned.append(asm(form, *operands))
    return cast(turned, ir.F16Type.get())


def asm(form: str, *operands: Any, results: int = 1) -> Any:
    """Run assembly on registers of 32 bits, and return one result, or a list of several. It must
    write none before it has read all operands."""
    i32 = ir.IntegerType.get_signless(32)
    kind = i32 if results == 1 else llvm.StructType.get_literal([i32] * results)
    constraints = ",".join(["=r"] * results + ["r"] * len(operands))
    value = llvm.inline_asm(kind, list(operands), form, constraints)
    return value if results == 1 else [llvm.extractvalue(i32, value, [i]) for i in range(results)]


def ref_dtype(ref: ir.Value) -> ir.Type:
    return ir.MemRefType(ref.type).element_type


def grid(array: mgpu.FragmentedArray) -> np.ndarray:
    """Return the registers by matrix, [rows / SIDE, columns / SIDE]."""
    return array.registers.reshape(array.shape[1] // SIDE, array.shape[2] // SIDE).copy()


def fragment(grid: np.ndarray, shape: tuple[int, ...], dtype: ir.Type) -> mgpu.FragmentedArray:
    layout = LANES.to_mgpu()
    signed = True if isinstance(dtype, ir.IntegerType) else None
    registers = grid.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def first_rows(grid: np.ndarray, rows: int) -> np.ndarray:
    """Return the registers of the first rows of an array that repeats."""
    return np.tile(grid, (-(-rows // SIDE // len(grid)), 1))[: rows // SIDE]


def objects(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def element(vector_of_two: ir.Value, place: int) -> ir.Value:
    position = ir.DenseI64ArrayAttr.get([place])
    return vector.extract(vector_of_two, dynamic_position=[], static_position=position)


def lane() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(utils.thread_idx(), utils.c(32, i32))


def warp() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.divui(utils.thread_idx(), utils.c(32, i32))


def place_in_matrix() -> tuple[ir.Value, ir.Value]:
    """Return the row and the pair of columns that this lane holds."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.divui(lane(), utils.c(4, i32)), arith.remui(lane(), utils.c(4, i32))


def less(value: ir.Value, bound: int, equal: bool = False) -> ir.Value:
    predicate = arith.CmpIPredicate.eq if equal else arith.CmpIPredicate.ult
    return arith.cmpi(predicate, value, utils.c(bound, value.type))


def twice(value: ir.Value) -> ir.Value:
    return arith.addi(value, value)


def index(value: ir.Value, offset: int) -> ir.Value:
    moved = arith.addi(value, utils.c(offset, value.type))
    return arith.index_castui(ir.IndexType.get(), moved)


@dataclasses.dataclass(frozen=True)
class _Places:
    """The addresses of matrices in shared memory, in elements from a warp's own.

    Args:
        matrices: the first element of each matrix.
        row: elements between the rows of a matrix; 0 repeats its first row.
        warp: elements between neighbouring warps, or groups of them.
        together: how many warps read the same matrices.
        swizzled: how many parts of a row are swizzled (swizzle.py).
    """

    matrices: tuple[int, ...]
    row: int
    warp: int
    together: int = 1
    swizzled: int = 1


def matrices_of_rows(ref: ir.Value, rows: int, swizzled: bool) -> _Places:
    """Return the matrices of a warp's rows in an array [WARPS * rows, columns], or in its tiles
    [WARPS * rows / SIDE, tiles, SIDE, columns / tiles] (swizzle.py)."""
    kind = ir.MemRefType(ref.type)
    shape, strides = kind.shape, kind.get_strides_and_offset()[0]
    *_, row, column = strides
    assert column == 1, "rows are contiguous"
    tiles, width = (shape[1] if len(shape) == 4 else 1), shape[-1]
    matrix, tile = strides[:2] if len(shape) == 4 else (SIDE * row, 0)
    starts = [
        matrix * i + tile * j + k
        for i in range(rows // SIDE)
        for j in range(tiles)
        for k in range(0, width, SIDE)
    ]
    parts = width // SIDE if swizzled else 1
    return _Places(tuple(starts), row, matrix * rows // SIDE, swizzled=parts)


def matrices_in_columns(ref: ir.Value) -> _Places:
    """Return the matrices of an array [columns / SIDE, rows, SIDE], the same for every warp."""
    kind = ir.MemRefType(ref.type)
    (columns, rows, _), (column, row, element) = kind.shape, kind.get_strides_and_offset()[0]
    assert element == 1, "rows of matrices are contiguous"
    starts = [SIDE * row * i + column * j for i in range(rows // SIDE) for j in range(columns)]
    return _Places(tuple(starts), row, 0)


def vectors_of(ref: ir.Value, times: int = 1) -> _Places:
    kind = ir.MemRefType(ref.type)
    (entries, size), (stride, element) = kind.shape, kind.get_strides_and_offset()[0]
    assert element == 1, "vectors are contiguous"
    starts = tuple(i for i in range(0, size, SIDE) for _ in range(times))
    return _Places(starts, 0, stride, WARPS // entries)


def ldmatrix(ref: ir.Value, places: _Places, transposed: bool) -> np.ndarray:
    """Load the matrices at these places."""
    i32 = ir.IntegerType.get_signless(32)
    row = arith.remui(lane(), utils.c(SIDE, i32))
    number = warp()
    if places.together > 1:
        number = arith.divui(number, utils.c(places.together, i32))
    first = arith.addi(
        arith.muli(number, utils.c(places.warp, i32)), arith.muli(row, utils.c(places.row, i32))
    )
    return ldmatrix_at(ref, first, places.matrices, transposed, places.swizzled)


def ldmatrix_at(
    ref: ir.Value, first: ir.Value, matrices: Sequence[int], transposed: bool, swizzled: int = 1
) -> np.ndarray:
    """Load matrices, four at a time if there are four: lanes 8 i .. 8 i + 7 address the rows of
    the i-th of them.

    Args:
        first: where this lane's row is, in elements, if its matrix begins at 0.
        matrices: the first element of each matrix.
        swizzled: how many parts of a row are swizzled.
    """
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ref_dtype(ref))
    base = utils.memref_ptr(ref)
    layout = nvvm.MMALayout.col if transposed else nvvm.MMALayout.row
    square = ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8,n=8>")
    loaded: list[ir.Value] = []
    for offset, count in addresses(first, matrices, swizzled):
        pointer = utils.getelementptr(base, [offset], ref_dtype(ref))
        value = nvvm.ldmatrix(
            pointer, layout=layout, num=count, shape=square, elt_type=nvvm.LdStMatrixEltType.B16
        )
        parts = (
            [value] if count == 1 else [llvm.extractvalue(i32, value, [i]) for i in range(count)]
        )
        loaded += [utils.bitcast(part, pair) for part in parts]
    return objects(loaded)


def addresses(
    first: ir.Value, matrices: Sequence[int], swizzled: int
) -> Iterator[tuple[ir.Value, int]]:
    """Yield the element that this lane addresses in each load of `ldmatrix_at`, and the number of
    matrices that are loaded."""
    i32 = ir.IntegerType.get_signless(32)
    octet = arith.divui(lane(), utils.c(SIDE, i32))
    for starts in _batches(matrices, 4):
        offset = first
        for bit, of_bit in enumerate(_bits_of_steps(starts)):
            chosen = arith.andi(octet, utils.c(1 << bit, i32))
            step = arith.muli(arith.shrui(chosen, utils.c(bit, i32)), utils.c(of_bit, i32))
            offset = arith.addi(offset, step)
        # Of a start, only the place in a row meets the bits that are exchanged. All else is added,
        # as a constant that costs no instruction. So a loop needs one address for each such place.
        inside = starts[0] % (SIDE * swizzled)
        if swizzled > 1:
            assert not any((start - starts[0]) & inside for start in starts), "no carries"
            offset = exchanged(offset, swizzled)
        if inside:
            offset = arith.xori(offset, utils.c(inside, i32))
        yield arith.addi(offset, utils.c(starts[0] - inside, i32)), len(starts)


def exchanged(offset: ir.Value, parts: int) -> ir.Value:
    """Return the place to which the copy engine writes a 16-bit element: it takes the number of its
    part in a row XOR that of its 128 bytes."""
    i32 = ir.IntegerType.get_signless(32)
    moved = arith.shrui(offset, utils.c(_OF_LINE - _OF_PART, i32))
    return arith.xori(offset, arith.andi(moved, utils.c((parts - 1) << _OF_PART, i32)))


def _batches(starts: Sequence[int], maximum: int) -> Iterator[Sequence[int]]:
    size = next(size for size in (maximum, maximum // 2, 1) if len(starts) % size == 0)
    return (starts[i : i + size] for i in range(0, len(starts), size))


def _bits_of_steps(starts: Sequence[int]) -> list[int]:
    """Return how far the first and the second bit of a matrix's number move its start."""
    steps = [starts[1 << bit] - starts[0] for bit in range(len(starts).bit_length() - 1)]
    assert len(starts) < 4 or starts[3] - starts[0] == sum(steps)
    return steps


def mma(sums: np.ndarray, a: Sequence[ir.Value], b: Sequence[ir.Value]) -> np.ndarray:
    """Return the two registers of 16 x 8 sums plus the product of 16 x 16 and 16 x 8 numbers."""
    dtype = ir.VectorType(a[0].type).element_type  # prints as PTX names it: f16 or bf16
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    numbers = [element(pair, place) for pair in sums for place in range(2)]
    operands = [utils.bitcast(register, i32) for register in (*a, *b)]
    value = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*operands, *numbers],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
    )
    results = [llvm.extractvalue(f32, value, [i]) for i in range(4)]
    pair = ir.VectorType.get((2,), f32)
    return objects([vector.from_elements(pair, results[i : i + 2]) for i in (0, 2)])
