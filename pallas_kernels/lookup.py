"""Codes of packed words, bit by bit: chosen from a table, or as numbers. Building blocks of table.py and polar.py.

A table in memory cannot be indexed with a tile of codes: a gather per element is what low-bit kernels must not do. Here an entry is chosen
by the bits of its code, with a tree of selects: bit 0 halves the entries, bit 1 the rest, and so on, 2^bits - 1 selects in all. In assembly
tables are read faster (table.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float16, Int16

from pallas_kernels.planes import Planes, half2, twice
from pallas_kernels.tile import Tile

Entry = Float16[Array, "#rows #W"]


# ---- codes, bit by bit ----


class Bit(NamedTuple):
    """Where one bit of a code is: bit `position` of the words of a tile, in one of the plane sets."""

    set: int
    tile: int
    position: int


@functools.cache
def code_bits(planes: Planes, slot: int, chunk: int) -> tuple[Bit, ...]:
    """Where the bits of a chunk's codes are, lowest first."""
    number, found = slot * planes.chunks + chunk, []
    for i, bits in enumerate(planes.sets):
        index, tile = divmod(number, planes.tiles(bits))
        found += [Bit(i, tile, bits * index + j) for j in range(bits)]
    return tuple(found)


class Words(NamedTuple):
    """The words of a tile of tokens: tiles[set][j] are W-wide tiles of [tile / slots] rows."""

    tiles: list[list[Int16[Array, "rows W"]]]

    @classmethod
    def read(cls, refs: Sequence[Any], planes: Planes, tile: Tile) -> Words:
        rows = pl.ds(tile.offset(planes.slots), tile.size // planes.slots)
        sets = zip(refs, planes.sets, strict=False)
        return cls([[ref[rows, pl.ds(planes.width * j, planes.width)] for j in range(planes.tiles(bits))] for ref, bits in sets])

    def of(self, bit: Bit) -> Int16[Array, "rows W"]:
        return self.tiles[bit.set][bit.tile]

    def moved(self, bit: Bit, to: int) -> Int16[Array, "rows W"]:
        """Words in which the bit stands at position `to`, among other bits."""
        words, by = self.of(bit), bit.position - to
        if by > 0:
            return lax.shift_right_logical(words, jnp.full((), by, jnp.int16))
        return lax.shift_left(words, jnp.full((), -by, jnp.int16)) if by < 0 else words


def chosen(words: Words, bits: Sequence[Bit], entries: Sequence[Entry]) -> Float16[Array, "rows W"]:
    """entries[code] for the codes that `bits` (lowest first) spell; len(entries) == 2^len(bits)."""
    for bit in bits:
        is_set = (words.of(bit) & _int16(1 << bit.position)) != _int16(0)
        entries = [jnp.where(is_set, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
    [found] = entries
    return found


def number(words: Words, bits: Sequence[Bit], asm: bool) -> tuple[Float16[Array, "rows W"], int]:
    """(bias + code in fp16, bias) of the codes that `bits` spell, lowest first, by the exponent trick of planes.py."""
    # no shift, or one that many fields share, where the ten bits of the mantissa then hold the code
    first = bits[0].position
    at = next(place for place in (first, first - 8, 0) if 0 <= place <= 10 - len(bits))
    return _gathered(words, bits, at, (25 - at) << 10, asm), 1 << (10 - at)


def _gathered(words: Words, bits: Sequence[Bit], at: int, base: int, asm: bool) -> Float16[Array, "rows W"]:
    """base | code << at, as the bits of fp16 numbers."""
    runs: list[list[int]] = []  # neighbouring bits of one word, which move together
    for i, bit in enumerate(bits):
        if runs and bit == bits[i - 1]._replace(position=bits[i - 1].position + 1):
            runs[-1].append(i)
        else:
            runs.append([i])
    found: Array | None = None
    for run in runs:
        bit, to = bits[run[0]], at + run[0]
        mask = sum(1 << (at + i) for i in run)
        if asm:
            by = bit.position - to
            move = f"{'shr' if by > 0 else 'shl'}.b32 t, $1, {abs(by)};"
            rest = twice(base) if found is None else "$2"
            operands = [words.of(bit), *([] if found is None else [found])]
            found = half2(f"{{ .reg .b32 t; {move} lop3.b32 $0, t, {twice(mask)}, {rest}, 0xea; }}", *operands)
        else:
            part = words.moved(bit, to) & _int16(mask)
            found = part | (_int16(base) if found is None else found)
    assert found is not None
    return found if asm else lax.bitcast_convert_type(found, jnp.float16)


def _int16(bits: int) -> np.int16:
    return np.uint16(bits).view(np.int16)
