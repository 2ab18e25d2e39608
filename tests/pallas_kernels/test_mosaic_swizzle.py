"""Warps find the rows that the copy engine has swizzled, and read them without bank conflicts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_kernels.launch import Launch
from tests.pallas_kernels.harness import KernelCase, Lengths, lowered_attention
from tests.pallas_kernels.kernel_cases import CASES, innerq, kivi, rows, turned
from tests.pallas_kernels.lowering import needs_mosaic

pytestmark = needs_mosaic

WARPS, LANES, SIDE = 4, 32, 8
PART, BANKS = 16, 32  # bytes that a lane addresses; words of four bytes
COLUMNS = [16, 32, 64, 128, 256]  # of 16 bits
ROWS = [8, 16, 32]  # of a warp

OPERATIONS: dict[str, Callable[..., Any]] = {
    "arith.addi": np.add,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.xori": np.bitwise_xor,
    "arith.shrui": np.right_shift,
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
}


def executed(value: Any, arguments: list[np.ndarray]) -> np.ndarray:
    """Compute a value of integer operations for all threads."""
    from jaxlib.mlir import ir

    if isinstance(value.owner, ir.Block):
        return arguments[ir.BlockArgument(value).arg_number]
    operation = value.owner
    if operation.name == "arith.constant":
        return np.asarray(ir.IntegerAttr(operation.attributes["value"]).value)
    return OPERATIONS[operation.name](*(executed(x, arguments) for x in operation.operands))


def addresses(
    columns: int, rows: int, swizzled: bool, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """Return the byte that each thread addresses for each matrix, [warps, rows / 8, columns / 8,
    row of the matrix]."""
    from jax._src.interpreters import mlir  # JAX does not export contexts with all dialects
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    from pallas_kernels.mosaic import registers

    loads: list[tuple[np.ndarray, int]] = []
    threads = np.arange(WARPS * LANES)
    arguments = [threads % LANES, threads // LANES]
    shape = [WARPS * rows, columns]
    tiles, width = tiles_of(columns)
    if swizzled and tiles > 1:
        shape = [WARPS * rows // SIDE, tiles, SIDE, width]

    def load(_: Any, first: Any, matrices: Any, transposed: bool, swizzled: int) -> Any:
        for offset, count in registers.addresses(first, matrices, swizzled):
            loads.append((2 * executed(offset, arguments), count))
        return np.empty(0)

    with mlir.make_ir_context(), ir.Location.unknown():
        module, i32 = ir.Module.create(), ir.IntegerType.get_signless(32)
        kinds = [i32, i32, ir.MemRefType.get(shape, ir.BF16Type.get())]
        with ir.InsertionPoint(module.body):
            block = func.FuncOp("threads", ir.FunctionType.get(kinds, [])).add_entry_block()
        of_lane, of_warp, ref = block.arguments
        monkeypatch.setattr(registers, "lane", lambda: of_lane)
        monkeypatch.setattr(registers, "warp", lambda: of_warp)
        monkeypatch.setattr(registers, "ldmatrix_at", load)
        with ir.InsertionPoint(block):
            registers.ldmatrix(ref, registers.matrices_of_rows(ref, rows, swizzled), False)
    of_octets = [load.reshape(WARPS, LANES // SIDE, SIDE)[:, :count] for load, count in loads]
    return np.concatenate(of_octets, 1).reshape(WARPS, rows // SIDE, columns // SIDE, SIDE)


def tiles_of(columns: int) -> tuple[int, int]:
    """Return the number of tiles beside each other, and the columns of each, as the copy engine is
    told."""
    from pallas_kernels.mosaic.swizzle import transforms_of

    *tiling, swizzle = transforms_of(columns)
    width = swizzle.swizzle // 2
    assert [t.tiling for t in tiling] == ([(SIDE, width)] if width < columns else [])
    return columns // width, width


def written(columns: int, rows: int) -> np.ndarray:
    """Return the byte to which the copy engine writes each part of 16 bytes, [rows, columns / 8]:
    bits 4, 5 and 6 of an address are exchanged by bits 7, 8 and 9, as many as parts in a row
    need."""
    tiles, width = tiles_of(columns)
    parts = width // SIDE
    row, part = np.arange(rows)[:, None], np.arange(tiles * parts)
    tile = row // SIDE * tiles + part // parts
    address = PART * ((tile * SIDE + row % SIDE) * parts + part % parts)
    bits = {2: 0b1, 4: 0b11, 8: 0b111}[parts]
    return address ^ (address >> 7 & bits) << 4


def turns(addresses: np.ndarray) -> set[int]:
    """Return how many turns the banks take for the eight rows of each matrix."""
    words = addresses[..., None] // 4 + np.arange(PART // 4)
    banks = words.reshape(-1, SIDE * PART // 4) % BANKS
    return {int(np.bincount(of_matrix, minlength=BANKS).max()) for of_matrix in banks}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_lanes_address_rows_where_the_copy_engine_writes_them(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    of_matrices = written(columns, WARPS * rows).reshape(WARPS, -1, SIDE, columns // SIDE)
    wanted = np.moveaxis(of_matrices, 2, 3)
    actual = addresses(columns, rows, True, monkeypatch)
    np.testing.assert_array_equal(actual, wanted)
    assert len(np.unique(actual)) == actual.size, "lanes read the same bytes"
    plain = addresses(columns, rows, False, monkeypatch)
    assert (plain != wanted).any(), "rows as they are stored would pass"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("columns", "before"), [(16, 2), (32, 4), *((columns, 8) for columns in COLUMNS[2:])]
)
def test_the_rows_of_a_matrix_share_no_bank(
    columns: int, before: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    assert turns(addresses(columns, rows, True, monkeypatch)) == {1}
    assert turns(addresses(columns, rows, False, monkeypatch)) == {before}, "no swizzle would pass"


def copied(case: KernelCase, monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int | None]]:
    """Return the bytes of a row of 16-bit numbers, and the bytes within which the copy engine
    swizzles, of each copy of whole rows."""
    from jax.experimental.mosaic.gpu import launch_context
    from jaxlib.mlir import ir

    copies, copy = set(), launch_context.LaunchContext.async_copy

    def spied(self: Any, *, src_ref: Any, dst_ref: Any, **options: Any) -> Any:
        kind = ir.MemRefType(src_ref.type)
        copies.add((2 * kind.shape[-1], options.get("swizzle")))
        return copy(self, src_ref=src_ref, dst_ref=dst_ref, **options)

    monkeypatch.setattr(launch_context.LaunchContext, "async_copy", spied)
    lowered_attention(case, Launch(route="mosaic"))
    return copies


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (rows(64, 4), {(128, 128)}),
        (rows(256, 4), {(512, 128)}),
        (kivi(2, 128), {(32, 32)}),
        (turned(kivi(4, 128)), {(64, 64)}),
        (innerq(3, "sym", 128), {(64, 64)}),
        (CASES["k_dense_v2"], {(256, 128), (32, 32)}),
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_the_copy_engine_swizzles_rows(
    case: KernelCase, wanted: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    copies = copied(case, monkeypatch)
    assert {(row, swizzle) for row, swizzle in copies if swizzle} == wanted


def test_rows_that_end_inside_a_tile_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    odd = dataclasses.replace(rows(128, 4), long=Lengths(137, (0, 63, 137)))
    assert copied(odd, monkeypatch) == {(256, None)}
    even = dataclasses.replace(odd, long=Lengths(136, (0, 63, 136)))
    assert copied(even, monkeypatch) == {(256, 128)}
