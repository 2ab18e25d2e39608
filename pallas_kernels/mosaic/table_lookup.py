"""Look up codes of 2, 3 or 4 bits in a table of fp16 numbers, four fields of a register at a time.

The idea and its count of instructions are in tiles/table_lookup.py: four codes in the nibbles of 16
bits are a selector of `prmt`. A register of two neighbouring words gives four registers of entries.
Like the operations of matrices.py this has two forms: instructions on registers, and array
operations, which the interpreter runs.
"""

# pyright: reportArgumentType=false
# the stubs of MLIR do not say how many results inline assembly has

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.mosaic.matrices import code_numbers
from pallas_kernels.mosaic.registers import LANES, SIDE, WARPS, asm, element, fragment, grid
from pallas_kernels.tiles.layout import PlaneLayout
from pallas_kernels.tiles.table_lookup import byte_planes


def packed(table: jax.Array) -> jax.Array:
    """Return the low bytes of a table's fp16 numbers, four in a word, then the high bytes, int32
    [2^bits / 2]."""
    bits = lax.bitcast_convert_type(table.astype(jnp.float16), jnp.uint16).astype(jnp.uint32)
    return jnp.stack(byte_planes(list(bits)))


def in_registers(numbers: Sequence[jax.Array], interpret: bool) -> list[jax.Array]:
    """Return the words of `packed` as `entries` takes them, for the numbers of a table in fp32. A
    kernel calls this once, before its loop: a launch to pack a layer's own table would take longer.

    It hides from the compiler that all lanes have the same words. Otherwise the compiler would keep
    them in uniform registers, and copy one for every `prmt` that reads it.
    """
    shape, count = (WARPS, SIDE, SIDE), len(numbers) // 2
    if interpret:
        return [jnp.full(shape, word) for word in packed(jnp.stack(numbers))]
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()),) * len(numbers),
        return_type=[plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=LANES)] * count,
    )

    @inline
    def hidden(ctx: Any, *numbers: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
        form = "{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }"
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), i32)
        arrays = []
        halves = [arith.truncf(ir.F16Type.get(), n.registers.item()) for n in numbers]
        two = ir.VectorType.get((2,), ir.F16Type.get())
        pairs = zip(*[iter(halves)] * 2, strict=True)
        for word in words_of([utils.bitcast(vector.from_elements(two, p), i32) for p in pairs]):
            register = asm(form, word)
            registers = np.full((1, 1), vector.broadcast(pair, register), dtype=object)
            arrays.append(fragment(registers, shape, i32))
        return arrays

    return list(hidden(*numbers))


def words_of(pairs: Sequence[Any]) -> list[Any]:
    """Return the words of `packed` for the registers of a table's fp16 numbers, two in each."""
    return [
        _prmt(first, second, chosen)
        for chosen in (0x6420, 0x7531)
        for first, second in zip(*[iter(pairs)] * 2, strict=True)
    ]


def entries(
    words: Sequence[jax.Array],
    layout: PlaneLayout,
    table: Sequence[jax.Array],
    tokens: int,
    interpret: bool,
) -> list[jax.Array]:
    """Return the entries of the codes of a span, fp16, in chunks of channels.

    Args:
        words: of each plane set, [WARPS, tokens, words] or its transpose.
        layout: of the words.
        table: of `in_registers`.
        tokens: the axis of the tokens, 1 or 2.
    """
    numbers = [(slot, c) for c in range(layout.chunks) for slot in range(layout.slots)]
    if interpret:
        of_codes = _numbers(table)
        slots = [of_codes[_codes(words, layout, number, 3 - tokens)] for number in numbers]
        n = layout.slots
        return [jnp.concatenate(slots[i : i + n], tokens) for i in range(0, len(slots), n)]
    shape = list(words[0].shape)
    shape[tokens] *= layout.slots
    shape[3 - tokens] = layout.width
    returned = plgpu.ShapeDtypeStruct(tuple(shape), jnp.float16, layout=LANES)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,) * (len(words) + len(table)), return_type=[returned] * layout.chunks
    )

    @inline
    def looked_up(ctx: Any, *arrays: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
        i32, f16 = ir.IntegerType.get_signless(32), ir.F16Type.get()
        grids = [
            _each(grid(array), lambda r: utils.bitcast(r, i32)) for array in arrays[: len(words)]
        ]
        of_table = [element(grid(array)[0, 0], 0) for array in arrays[len(words) :]]
        fields = Fields(grids, layout, 3 - tokens, of_table)
        chunks = []
        for c in range(layout.chunks):
            slots = [fields.registers(slot, c) for slot in range(layout.slots)]
            registers = _each(
                np.concatenate(slots, tokens - 1),
                lambda r: utils.bitcast(r, ir.VectorType.get((2,), f16)),
            )
            chunks.append(fragment(registers, tuple(shape), f16))
        return chunks

    return list(looked_up(*words, *table))


def _codes(
    words: Sequence[jax.Array], layout: PlaneLayout, number: tuple[int, int], axis: int
) -> jax.Array:
    field = layout.field(*number)
    return (code_numbers(words, field, layout.width, axis) - field.bias).astype(jnp.int32)


def _numbers(table: Sequence[jax.Array]) -> jax.Array:
    """Return the fp16 numbers of `in_registers`."""
    words = jnp.stack([word[0, 0, 0] for word in table])
    planes = jnp.stack([words >> shift for shift in (0, 8, 16, 24)], axis=1) & 255
    low, high = planes.reshape(2, -1)
    return lax.bitcast_convert_type((low | high << 8).astype(jnp.uint16), jnp.float16)


def _each(registers: np.ndarray, function: Callable[[Any], Any]) -> np.ndarray:
    results = np.empty(registers.shape, dtype=object)
    for place, register in np.ndenumerate(registers):
        results[place] = function(register)
    return results


class Fields:
    """The entries for the codes of words [rows / SIDE, columns / SIDE], plane by plane. Work that
    four fields share is done once. `axis` is the words', and a register holds 32 bits."""

    def __init__(
        self, grids: Sequence[np.ndarray], layout: PlaneLayout, axis: int, table: Sequence[Any]
    ):
        self._grids, self._layout, self._axis, self._table = grids, layout, axis, table
        self._by_nibbles: dict[tuple[int, int], list[np.ndarray]] = {}

    def registers(self, slot: int, chunk: int) -> np.ndarray:
        """Return the registers of one chunk of channels of a token slot."""
        low = self._layout.sets[0]
        index, tile = divmod(slot * self._layout.chunks + chunk, self._layout.tiles(low))
        # Of 2-bit fields, the even ones are in the nibbles, and the odd ones a shift away.
        nibble, odd = divmod(index, 4 // low)
        key = tile, odd
        if key not in self._by_nibbles:
            fours = _each(self._nibbles(tile, odd), self._four)
            planes = [_each(fours, lambda four, i=i: four[i]) for i in range(4)]
            self._by_nibbles[key] = planes
        return self._by_nibbles[key][nibble]

    def _tile(self, of_set: int, number: int) -> np.ndarray:
        width = self._layout.width // SIDE
        places = range(number * width, (number + 1) * width)
        return np.take(self._grids[of_set], places, self._axis - 1)

    def _nibbles(self, tile: int, odd: int) -> np.ndarray:
        """Return the words of a tile with a code in each nibble."""
        words = self._tile(0, tile)
        if self._layout.bits == 4:
            return words
        words = _each(words, lambda word: _masked(_shifted(word, 2 * odd), 0x33333333))
        if self._layout.bits == 2:
            return words
        number, thin_tile = divmod(tile, self._layout.tiles(1))
        # bit of nibble k: number 4 k + 2 odd + (low tile beyond the thin set's)
        moved = _each(self._tile(1, thin_tile), lambda word: _shifted(word, 2 * odd + number - 2))
        for place, bits in np.ndenumerate(moved):
            words[place] = asm("lop3.b32 $0, $1, 0x44444444, $2, 0xea;", bits, words[place])
        return words

    def _four(self, nibbles: Any) -> list[Any]:
        """Return the entries for the codes in each of the four nibbles of two words."""
        half = len(self._table) // 2
        low, high = self._table[:half], self._table[half:]
        wide = self._layout.bits == 4
        # The fourth bit of a selector has a meaning of its own.
        plain = _masked(nibbles, 0x77777777) if wide else nibbles
        moved = _shifted(nibbles, -4) if wide else nibbles
        planes = []
        for order, signs in ((0x20, 0xEAC8), (0x31, 0xFBD9)):
            # Of each of the two words, take the byte that holds these two nibbles: (word 0, word 1)
            # is a selector of four.
            selector = asm(f"prmt.b32 $0, $1, 0, {order:#x};", plain)
            if not wide:
                # 2 bits: low and high bytes are in one pair of registers, in either order.
                of_low, of_high = ((*low, *high), (*high, *low)) if half == 1 else (low, high)
                low_bytes, high_bytes = (_bytes(plane, selector) for plane in (of_low, of_high))
            else:
                # prmt can repeat the top bit of a byte. Here it repeats the fourth bits of the
                # nibbles, half of them after a shift, as four bytes of ones or zeros.
                mask = _prmt(moved, nibbles, signs)
                low_bytes, high_bytes = (
                    asm(
                        "lop3.b32 $0, $1, $2, $3, 0xca;",
                        mask,
                        _bytes(plane[2:], selector),
                        _bytes(plane[:2], selector),
                    )
                    for plane in (low, high)
                )
            planes += [_prmt(low_bytes, high_bytes, pairs) for pairs in (0x6240, 0x7351)]
        return planes


def _prmt(a: Any, b: Any, selector: int) -> Any:
    return asm(f"prmt.b32 $0, $1, $2, {selector:#x};", a, b)


def _bytes(table: Sequence[Any], selector: Any) -> Any:
    """Return four bytes of two words of a table."""
    return asm("prmt.b32 $0, $1, $2, $3;", *table, selector)


def _masked(word: Any, mask: int) -> Any:
    return asm(f"and.b32 $0, $1, {mask:#x};", word)


def _shifted(word: Any, right: int) -> Any:
    if not right:
        return word
    return asm(f"{'shr' if right > 0 else 'shl'}.b32 $0, $1, {abs(right)};", word)
