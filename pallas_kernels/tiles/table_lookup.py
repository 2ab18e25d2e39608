"""Look up codes of 2, 3 or 4 bits in one table that all channels share, for four fields of a word
at a time.

A word of 16 bits with four codes in its four nibbles *is* a selector of `prmt`, which chooses four
of eight bytes. So the low bytes of four entries take one instruction (for 16 entries two, and a
selection), their high bytes another, and combining them one for each pair of neighbouring words.
For a register of two words and each four fields of both:

    codes to nibbles     4 bits: none
                         3 bits: three, from two plane sets
                         2 bits: a mask, perhaps a shift
    two of the fields    selector (1), low bytes (1 or 2), high bytes (1 or 2), 16 entries: a mask
                         (1) and two selections, fp16 pairs (2)

    instructions per element: 2 / 3 / 4 bits   1.4 / 1.7 / 2.75

That is in assembly. In array operations the bits of a code choose its entry, with a tree of selects
on pairs: bit 0 halves the entries, bit 1 the rest, and so on, 2^bits - 1 selects for two elements.
A table in memory cannot be indexed with a tile of codes, because low-bit kernels must not gather
for each element.

Exact: entries are copied, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float16, Int16, Int32, UInt32

from pallas_kernels.tiles.halves import Half, Halves, out_of_pairs
from pallas_kernels.tiles.layout import PlaneLayout
from pallas_kernels.tiles.words import Bit, PairedWords, WordTiles, code_bits
from pallas_kernels.triton_call import plt


def byte_planes(entries: Sequence[UInt32[Array, "*lead"]]) -> list[Int32[Array, "*lead"]]:
    """Return the bits of fp16 entries in the order of `prmt`: the low bytes of all entries, four in
    a word, then the high bytes.
    """
    planes = [entry & np.uint32(255) for entry in entries] + [
        entry >> np.uint32(8) for entry in entries
    ]
    words = [
        first | second << 8 | third << 16 | fourth << 24
        for first, second, third, fourth in zip(*[iter(planes)] * 4, strict=True)
    ]
    return [lax.bitcast_convert_type(word, jnp.int32) for word in words]


def chosen(
    words: PairedWords, bits: Sequence[Bit], entries: Sequence[UInt32[Array, "#a #b"]]
) -> Halves:
    """Return entries[code] for the codes that `bits` (lowest first) spell. Entries are fp16
    numbers, repeated in both halves of 32 bits.
    """
    for bit in bits:
        mask = (words.moved(bit.set, bit.tile, bit.position) & np.uint32(0x10001)) * np.uint32(
            0xFFFF
        )
        entries = [
            low ^ ((low ^ high) & mask)
            for low, high in zip(entries[::2], entries[1::2], strict=True)
        ]
    [chosen_entry] = entries
    return out_of_pairs(chosen_entry, words.axis)


class LookupTable(NamedTuple):
    """The entries of a table, prepared once outside of a loop.

    entries: each one in both halves of 32 bits, for array operations. bytes: the words of its
    `byte_planes`, for assembly.
    """

    entries: Sequence[UInt32[Array, "1 1"]]
    bytes: Sequence[Int32[Array, "1 1"]]

    @classmethod
    def read(cls, ref: Any, asm: bool) -> LookupTable:
        """Read the numbers of a table, [entries]."""
        numbers = [ref[i].astype(jnp.float16).reshape(1, 1) for i in range(ref.shape[0])]
        bits = [
            lax.bitcast_convert_type(number, jnp.uint16).astype(jnp.uint32) for number in numbers
        ]
        if asm:
            return cls([], [in_registers(word) for word in byte_planes(bits)])
        return cls([entry * np.uint32(0x10001) for entry in bits], [])


class LookedUp(NamedTuple):
    """The table entries for the codes of a tile's words, plane by plane. Work that fields of a word
    share is done once.
    """

    words: WordTiles
    layout: PlaneLayout
    table: LookupTable
    by_nibbles: dict[tuple[int, int], list[Array]]  # four planes, by (tile, odd)

    @classmethod
    def of(cls, words: WordTiles, layout: PlaneLayout, table: LookupTable) -> LookedUp:
        return cls(words, layout, table, {})

    def plane(self, slot: int, chunk: int) -> Half:
        """Return the entries for one chunk of channels of a token slot."""
        if isinstance(self.words, PairedWords):
            return chosen(self.words, code_bits(self.layout, slot, chunk), self.table.entries)
        low = self.layout.sets[0]
        index, tile = divmod(slot * self.layout.chunks + chunk, self.layout.tiles(low))
        # Of 2-bit fields, the even ones are in the nibbles, and the odd ones a shift away.
        nibble, odd = divmod(index, 4 // low)
        key = tile, odd
        if key not in self.by_nibbles:
            self.by_nibbles[key] = self._four(tile, odd)
        return self.by_nibbles[key][nibble]

    def _four(self, tile: int, odd: int) -> list[Array]:
        words = self.words.tiles[0][tile]
        if self.layout.bits == 3:
            tiles = self.layout.tiles(1)
            number, tile = divmod(tile, tiles)
            # bit of nibble k: number 4 k + 2 odd + (low tile beyond the thin set's)
            words = three_bit_nibbles(words, self.words.tiles[1][tile], odd, 2 * odd + number)
        elif self.layout.bits == 2:
            words = _pairs(
                f"{'shr.b32 t, $1, 2;' if odd else 'mov.b32 t, $1;'} and.b32 $0, t, 0x33333333;",
                words,
            )
        return four_planes(words, self.layout.bits, self.table.bytes)


def in_registers(word: Int32[Array, "1 1"]) -> Int32[Array, "1 1"]:
    """Return the same number, hiding from the compiler that all lanes have it.

    Otherwise it would keep the number in a uniform register, and copy it out for every `prmt` that
    reads it.
    """
    [register] = plt.elementwise_inline_asm(
        "{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }",
        args=[word],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1, 1), jnp.int32)],
    )
    return register


def three_bit_nibbles(
    low: Int16[Array, "rows W"], high: Int16[Array, "rows W"], odd: int, position: int
) -> Int16[Array, "rows W"]:
    """Join codes whose low bits are every other field of `low` and whose third bits are every
    fourth bit of `high` from `position` on.
    """
    by = position - 2
    moved = "mov.b32 u, $2;" if by == 0 else f"{'shr' if by > 0 else 'shl'}.b32 u, $2, {abs(by)};"
    fields = "shr.b32 t, $1, 2;" if odd else "mov.b32 t, $1;"
    return _pairs(
        f"{moved} and.b32 u, u, 0x44444444; {fields} lop3.b32 $0, t, 0x33333333, u, 0xea;",
        low,
        high,
    )


def four_planes(
    nibbles: Int16[Array, "rows W"], bits: int, table: Sequence[Int32[Array, "1 1"]]
) -> list[Float16[Array, "rows W"]]:
    """Return the entries for the codes in each of the four nibbles. Unused nibble bits are 0."""
    planes: list[Array] = []
    half = len(table) // 2
    low, high = table[:half], table[half:]
    plain = nibbles if bits < 4 else _pairs("and.b32 $0, $1, 0x77777777;", nibbles)
    for fields in range(2):
        # Of each of the two words, take the byte that holds these two nibbles: (word 0, word 1) is
        # a selector of four.
        selector = _pairs(f"prmt.b32 $0, $1, 0, {(0x20, 0x31)[fields]:#x};", plain)
        if bits == 2:
            low_bytes, high_bytes = (
                _bytes("prmt.b32 $0, $2, $4, $1;", selector, *order)
                for order in ((*low, *high), (*high, *low))
            )
        elif bits == 3:
            low_bytes, high_bytes = (
                _bytes("prmt.b32 $0, $2, $4, $1;", selector, *plane) for plane in (low, high)
            )
        else:
            # prmt can repeat the top bit of a byte. Here it repeats the fourth bits of the nibbles,
            # half of them after a shift, as four bytes of ones or zeros.
            mask = _pairs(
                f"shl.b32 t, $1, 4; prmt.b32 $0, t, $1, {(0xEAC8, 0xFBD9)[fields]:#x};", nibbles
            )
            choose = "prmt.b32 t, $3, $5, $1; prmt.b32 u, $7, $9, $1; lop3.b32 $0, $2, u, t, 0xca;"
            low_bytes, high_bytes = (
                _bytes(choose, selector, *plane, mask=mask) for plane in (low, high)
            )
        planes += [
            _pairs(f"prmt.b32 $0, $1, $2, {order:#x};", low_bytes, high_bytes, dtype=jnp.float16)
            for order in (0x6240, 0x7351)
        ]
    return planes


def _bytes(assembly: str, selector: Array, *table: Array, mask: Array | None = None) -> Array:
    # A 32-bit operand is a pair of registers, one for each element. Here both hold the same word.
    tiles = [selector] if mask is None else [selector, mask]
    wide = [jnp.broadcast_to(word, selector.shape) for word in table]
    return _inline(assembly, [*tiles, *wide], ["r"] * len(tiles) + ["r,r"] * len(wide))


def _pairs(assembly: str, *operands: Array, dtype: jax.typing.DTypeLike = jnp.int16) -> Array:
    return _inline(assembly, list(operands), ["r"] * len(operands), dtype)


def _inline(
    assembly: str,
    operands: list[Array],
    constraints: list[str],
    dtype: jax.typing.DTypeLike = jnp.int16,
) -> Array:
    """Run inline assembly with one register for each two neighbouring words, whatever its bits
    mean.
    """
    [result] = plt.elementwise_inline_asm(
        f"{{ .reg .b32 t, u; {assembly} }}",
        args=operands,
        constraints=",".join(["=r", *constraints]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, dtype)],
    )
    return result
