"""The packed words of a tile of tokens, and the codes in them as fp16 numbers."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float16, Int16, Int32, UInt32

from pallas_kernels.tiles.arithmetic import half2, twice
from pallas_kernels.tiles.halves import Half, Halves, in_pairs, out_of_pairs
from pallas_kernels.tiles.layout import Field, PlaneLayout
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.triton_call import plt


class Bit(NamedTuple):
    """The place of one bit of a code: bit `position` of the words of a tile, in one of the plane
    sets.
    """

    set: int
    tile: int
    position: int


@functools.cache
def code_bits(layout: PlaneLayout, slot: int, chunk: int) -> tuple[Bit, ...]:
    """Return the places of the bits of a chunk's codes, lowest first."""
    number, places = slot * layout.chunks + chunk, []
    for i, bits in enumerate(layout.sets):
        index, tile = divmod(number, layout.tiles(bits))
        places += [Bit(i, tile, bits * index + j) for j in range(bits)]
    return tuple(places)


class BitRun(NamedTuple):
    """Bits of one word that move together: (words of the tile >> shift) & mask. Negative shifts go
    left.
    """

    set: int
    tile: int
    shift: int
    mask: int


@dataclasses.dataclass(frozen=True)
class WordTiles(abc.ABC):
    """The packed words of a tile of tokens. tiles[set][j] is the j-th tile of a plane set, with W
    words for each of the tile's rows.
    """

    tiles: list[list[Any]]

    @abc.abstractmethod
    def shifted(self, amounts: Sequence[Int32[Array, "1 1"]]) -> WordTiles:
        """Return the words of each plane set shifted right by amounts that are known when the
        kernel runs. The bits shifted in are not a code.
        """

    @abc.abstractmethod
    def gathered(self, runs: Sequence[BitRun], bits: int) -> Half:
        """Return the fp16 numbers whose bits are `bits`, or-ed with the bits of the runs."""

    def codes(self, field: Field) -> Half:
        """Return bias + code of one field, exactly."""
        runs = [BitRun(0, field.tile, field.shift, field.mask)]
        if field.high_tile is not None:
            runs.append(BitRun(1, field.high_tile, field.high_shift, field.high_mask))
        return self.gathered(runs, field.exponent)

    def number(
        self, bits: Sequence[Bit], places: Sequence[int] | None = None, *, minimum: int = 0
    ) -> tuple[Half, int]:
        """Return (bias + code, bias) of the codes that `bits` spell, by the exponent trick of
        layout.py.

        Args:
            bits: the places of the bits of a code.
            places: which bit of the code each one is. None means 0, 1, ... Two may be the same if
                every lane has 0 in the words of one of them.
            minimum: the lowest bit of the mantissa at which a code may begin, which bounds the
                bias.
        """
        places = range(len(bits)) if places is None else places
        # No shift, or one that many fields share, if the ten bits of the mantissa then hold the
        # code.
        first = bits[0].position
        at = next(
            place for place in (first, first - 8, minimum) if minimum <= place < 10 - max(places)
        )
        runs: list[BitRun] = []
        for bit, i in zip(bits, places, strict=True):
            shift, mask = bit.position - (at + i), 1 << (at + i)
            if runs and runs[-1][:3] == (bit.set, bit.tile, shift):
                runs[-1] = runs[-1]._replace(mask=runs[-1].mask | mask)
            else:
                runs.append(BitRun(bit.set, bit.tile, shift, mask))
        return self.gathered(runs, (25 - at) << 10), 1 << (10 - at)


@dataclasses.dataclass(frozen=True)
class SingleWords(WordTiles):
    """Words as int16 [rows, W], for inline assembly, which takes two neighbours at a time."""

    tiles: list[list[Int16[Array, "rows W"]]]

    def shifted(self, amounts: Sequence[Int32[Array, "1 1"]]) -> SingleWords:
        return SingleWords(
            [
                [moved_right(words, by) for words in of_set]
                for of_set, by in zip(self.tiles, amounts, strict=True)
            ]
        )

    def gathered(self, runs: Sequence[BitRun], bits: int) -> Float16[Array, "rows W"]:
        """Gather with one `lop3` for each run and pair of words, and a shift, which other fields
        may share.
        """
        if (
            len(runs) == 1
            and (byte := runs[0]).mask == 0xFF
            and byte.shift in (0, 8)
            and bits == 0x6400
        ):
            index = byte.shift // 8  # bytes of two words, each below the byte 0x64
            selector = 0x4 << 12 | (2 + index) << 8 | 0x4 << 4 | index
            return half2(
                f"prmt.b32 $0, $1, 0x64646464, {selector:#x};", self.tiles[byte.set][byte.tile]
            )
        numbers: Array | None = None
        for run in runs:
            # The mask removes bits that cross from one half of the register into the other.
            move = f"{'shr' if run.shift > 0 else 'shl'}.b32 t, $1, {abs(run.shift)};"
            rest = twice(bits) if numbers is None else "$2"
            operands = [self.tiles[run.set][run.tile], *([] if numbers is None else [numbers])]
            numbers = half2(
                f"{{ .reg .b32 t; {move} lop3.b32 $0, t, {twice(run.mask)}, {rest}, 0xea; }}",
                *operands,
            )
        assert numbers is not None
        return numbers


@dataclasses.dataclass(frozen=True)
class PairedWords(WordTiles):
    """Words as uint32, two neighbours along `axis` in each, for array operations, which mask and
    shift two words at a time.

    zero: 0, but unknown to compilers. They would write a constant mask into a register before each
    of its uses. Constants that this is added to stay in a register.
    """

    tiles: list[list[UInt32[Array, "a b"]]]
    axis: int
    zero: UInt32[Array, ""]

    def shifted(self, amounts: Sequence[Int32[Array, "1 1"]]) -> PairedWords:
        by = [amount.astype(jnp.uint32) for amount in amounts]
        return PairedWords(
            [[words >> b for words in of_set] for of_set, b in zip(self.tiles, by, strict=True)],
            self.axis,
            self.zero,
        )

    def moved(self, set: int, tile: int, shift: int) -> UInt32[Array, "a b"]:
        """Shift the words of a tile right, or left if `shift` is negative."""
        words = self.tiles[set][tile]
        if shift > 0:
            return words >> np.uint32(shift)
        return words << np.uint32(-shift) if shift < 0 else words

    def gathered(self, runs: Sequence[BitRun], bits: int) -> Halves:
        pairs: Array = np.uint32(bits * 0x10001) + self.zero
        for i, run in enumerate(runs):
            # The mask removes bits that cross between halves.
            masked = self.moved(run.set, run.tile, run.shift) & np.uint32(run.mask * 0x10001)
            # Both give the same, because no bit is in both. But in a chain of one kind, compilers
            # would move the constant to the end, which takes one more instruction.
            pairs = pairs ^ masked if i % 2 else pairs | masked
        return out_of_pairs(pairs, self.axis)


def moved_right(words: Int16[Array, "rows W"], by: Int32[Array, "1 1"]) -> Int16[Array, "rows W"]:
    """Shift two neighbouring words right together."""
    [moved] = plt.elementwise_inline_asm(
        "shr.b32 $0, $1, $2;",
        args=[words, jnp.broadcast_to(by, words.shape)],
        constraints="=r,r,r,r",  # a 32-bit operand has a register for each of the two elements
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int16)],
    )
    return moved


def read_words(
    refs: Sequence[Any], layout: PlaneLayout, tile: Tile, axis: int, asm: bool
) -> WordTiles:
    """Read the words of a tile of tokens.

    Args:
        refs: words of each plane set.
        layout: of the words.
        tile: the tokens.
        axis: along which neighbours are paired, the one that a dot will contract.
        asm: compute with inline assembly.
    """
    rows = pl.ds(tile.offset(layout.slots), tile.size // layout.slots)
    tiles = [
        [ref[rows, pl.ds(layout.width * j, layout.width)] for j in range(layout.tiles(bits))]
        for ref, bits in zip(refs, layout.sets, strict=False)
    ]
    return SingleWords(tiles) if asm else paired(tiles, axis, tile.start)


def paired(
    tiles: Sequence[Sequence[Int16[Array, "rows W"]]], axis: int, start: Int32[Array, ""]
) -> PairedWords:
    """Put neighbouring words together. `start` may be any non-negative number that is known only
    when the kernel runs.
    """
    zero = lax.bitcast_convert_type(start >> np.int32(31), jnp.uint32)
    return PairedWords(
        [[in_pairs(words, axis) for words in of_set] for of_set in tiles], axis, zero
    )
