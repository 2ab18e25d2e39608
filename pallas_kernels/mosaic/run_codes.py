"""Codes of runs of channels, unpacked from the words of a warp's four slots (run_words.py): four
fp16 numbers, bias + code, from each word.

Like the operations of matrices.py this has two forms: instructions on registers, and array
operations, which the interpreter runs.
"""

# pyright: reportArgumentType=false
# the stubs of MLIR do not say how many results inline assembly has

from __future__ import annotations

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
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic.registers import (
    LANES,
    PAIR,
    ROWS,
    SIDE,
    WARPS,
    asm,
    fragment,
    grid,
    warp,
)
from pallas_kernels.mosaic.run_words import SLOTS, PlaneSet
from pallas_kernels.tiles.layout import PlaneLayout

LOWEST = 1  # the bit of the first slot's codes: their bias is 512, so fp16 holds halves beside it


class _Arrays:
    """Operations on words in an array, each 16 bits of a uint32."""

    def __init__(self) -> None:
        self.number = lax.broadcasted_iota(jnp.uint32, (WARPS, 1, 1), 0)

    def rotated(self, word: Any, plane: PlaneSet | None, right: int) -> Any:
        by = jnp.uint32(right % 32)
        if plane is not None:
            by = (plane.shift(self.number, lambda a, b: a // jnp.uint32(b)) + by) % 32
        by = jnp.broadcast_to(by, word.shape)
        return word if right == 0 and plane is None else (word >> by) | (word << (32 - by) % 32)

    def chosen(self, mask: int, first: Any, second: Any) -> Any:
        return (first & jnp.uint32(mask)) | (second & jnp.uint32(~mask & 0xFFFF))

    def masked(self, word: Any, mask: int, rest: Any) -> Any:
        return (word & jnp.uint32(mask)) | (jnp.uint32(rest) if isinstance(rest, int) else rest)


class _Registers:
    """Operations on registers of two words. Bits that cross from one into the other are masked
    out."""

    def __init__(self) -> None:
        self._amounts: dict[tuple[int, int, int], ir.Value] = {}

    def rotated(self, word: Any, plane: PlaneSet | None, right: int) -> Any:
        if plane is not None and plane.shift(WARPS - 1, lambda a, b: a // b):
            return asm("shf.r.wrap.b32 $0, $1, $1, $2;", word, self._amount(plane, right))
        if right == 0:
            return word
        return asm(f"{'shr' if right > 0 else 'shl'}.b32 $0, $1, {abs(right)};", word)

    def _amount(self, plane: PlaneSet, right: int) -> ir.Value:
        key = plane.bits, plane.rows, right
        if key not in self._amounts:
            i32 = ir.IntegerType.get_signless(32)

            def divide(a: ir.Value, b: int) -> ir.Value:
                return arith.divui(a, utils.c(b, i32))

            pairs = divide(warp(), plane.rows // 2)
            by = arith.muli(divide(pairs, plane.tiles), utils.c(plane.bits, i32))
            self._amounts[key] = arith.addi(by, utils.c(right, i32))
        return self._amounts[key]

    def chosen(self, mask: int, first: Any, second: Any) -> Any:
        form = f"lop3.b32 $0, {mask * PAIR:#x}, $1, $2, 0xca;"
        return asm(form, first, second)

    def masked(self, word: Any, mask: int, rest: Any) -> Any:
        if isinstance(rest, int):
            return asm(f"lop3.b32 $0, $1, {mask * PAIR:#x}, {rest * PAIR:#x}, 0xea;", word)
        return asm(f"lop3.b32 $0, $1, {mask * PAIR:#x}, $2, 0xea;", word, rest)


def position(bits: int, slot: int) -> int:
    """Return the bit at which `numbers` has the lowest bit of a slot's codes. Two slots share a
    shift if their codes fit."""
    return LOWEST + (4 if bits <= 5 and slot % 2 else 0)


def bias(bits: int, slot: int) -> int:
    """Return what `numbers` has beside the codes."""
    return 1 << 10 - position(bits, slot)


def middle(bits: int) -> float:
    """Return the code that stands for 0."""
    return 2 ** (bits - 1) - 0.5


def numbers(words: Sequence[Any], layout: PlaneLayout, ops: Any) -> list[Any]:
    """Return fp16 bias + code of each slot as 16 bits.

    Args:
        words: of each plane set, and of each load of it.
        layout: of the run.
        ops: how to compute with them.
    """
    bits = layout.bits
    planes = [PlaneSet(layout, of_set) for of_set in layout.sets]
    if bits == 8:
        of_bytes = [(words[i % 2], i // 2 * 8 - LOWEST) for i in range(SLOTS)]
        return [
            ops.masked(ops.rotated(word, None, right), 0xFF << LOWEST, 24 << 10)
            for word, right in of_bytes
        ]
    if bits <= 3:  # all of a code in each four bits
        low = ops.rotated(words[0], planes[0], -LOWEST)
        if bits == 3:
            high = ops.rotated(words[1], planes[1], -LOWEST - 2)
            low = ops.chosen(0x6666, low, high)
        two = [low, ops.rotated(low, None, 8)]
        return [_number(two[slot // 2], bits, slot, ops) for slot in range(SLOTS)]
    if bits <= 5:
        two = [ops.rotated(words[0], None, 8 * half - LOWEST) for half in range(2)]
        of_slots = [_number(two[slot // 2], 4, slot, ops) for slot in range(SLOTS)]
        if bits == 5:
            two = [ops.rotated(words[1], planes[1], 8 * half - LOWEST - 4) for half in range(2)]
            high = [16 << position(bits, slot) for slot in range(SLOTS)]
            of_slots = [ops.masked(two[s // 2], high[s], of_slots[s]) for s in range(SLOTS)]
        return of_slots
    low = [ops.rotated(words[0], None, 4 * slot - LOWEST) for slot in range(SLOTS)]
    low = [ops.masked(word, 15 << LOWEST, 24 << 10) for word in low]
    if bits == 6:
        high = [ops.rotated(words[1], planes[1], 4 * slot - LOWEST - 4) for slot in range(SLOTS)]
    else:
        both = ops.chosen(
            0x3333, ops.rotated(words[1], planes[1], 0), ops.rotated(words[2], planes[2], -2)
        )
        high = [ops.rotated(both, None, 4 * slot - LOWEST - 4) for slot in range(SLOTS)]
    mask = (2 ** (bits - 4) - 1) << LOWEST + 4
    return [ops.masked(h, mask, word) for h, word in zip(high, low, strict=True)]


def _number(word: Any, bits: int, slot: int, ops: Any) -> Any:
    at = position(bits, slot)
    return ops.masked(word, (2**bits - 1) << at, 25 - at << 10)


def codes(
    words: Sequence[jax.Array], layout: PlaneLayout, transposed: bool, interpret: bool
) -> list[jax.Array]:
    """Return fp16 bias + code of each slot, [WARPS, ROWS, channels] or the transpose, from
    `load_words` of each plane set."""
    channels = words[0].shape[1 if transposed else 2]
    if interpret:
        wide = [lax.bitcast_convert_type(w, jnp.uint16).astype(jnp.uint32) for w in words]
        parts = [part for w in wide for part in _loads(w, transposed)]
        of_slots = numbers(parts, layout, _Arrays())
        return [lax.bitcast_convert_type(n.astype(jnp.uint16), jnp.float16) for n in of_slots]
    shape = (WARPS, channels, ROWS) if transposed else (WARPS, ROWS, channels)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,) * len(words),
        return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=LANES)] * SLOTS,
    )

    @inline
    def unpacked(ctx: Any, *words: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
        i32, f16 = ir.IntegerType.get_signless(32), ir.F16Type.get()
        ops, size = _Registers(), ROWS // SIDE
        grids = []
        for registers in map(grid, words):
            axis = 1 if transposed else 0
            count = registers.shape[axis] // size
            grids += np.split(registers, count, axis)
        slots = [np.empty(grids[0].shape, dtype=object) for _ in range(SLOTS)]
        for place in np.ndindex(grids[0].shape):
            of_place = [utils.bitcast(registers[place], i32) for registers in grids]
            for slot, number in zip(slots, numbers(of_place, layout, ops), strict=True):
                slot[place] = utils.bitcast(number, ir.VectorType.get((2,), f16))
        return [fragment(slot, shape, f16) for slot in slots]

    return list(unpacked(*words))


def _loads(words: jax.Array, transposed: bool) -> list[jax.Array]:
    axis = 2 if transposed else 1
    return jnp.split(words, words.shape[axis] // ROWS, axis)
