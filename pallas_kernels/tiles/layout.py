"""The layout of packed words: which bits of which tile hold a code, and how to turn them into fp16
numbers.

Channel planes. A row of H channels is cut into c = H / W chunks of W neighbouring channels. The W
words of a *tile* hold, in bit field i, the codes of one whole chunk. So unpacking a field of a tile
takes one shift and one mask, and the result (a *plane*) has the tile's shape, without a reshape or
a gather. If one token does not fill whole words, n tokens share a row of words. In every span of P
tokens, word row r holds tokens r, P/n + r, 2P/n + r, ... Slot a of row r is token a * P/n + r, so
each slot of a span is a run of neighbouring tokens.

A row of words is m tiles wide, m = n * c * bits / 16. Field i of tile j holds slot and chunk number
i * m + j, counted slot-major (number = slot * c + chunk). So field i of the whole row, m * W words,
is one run of neighbouring channels: wide planes for a CPU, W-wide tiles for a GPU.

Codes whose width is not a power of two are split into plane sets, low bits first: 3 = 2 + 1, 5 = 4
+ 1, 9 = 8 + 1. A head dim that is not a multiple of 16 is padded to one with zero codes, and the
padding is stored (and counted).

From bits to fp16 without a conversion. Under the exponent bits (25 - p) << 10, mantissa bit p of an
fp16 number is worth 1. So a code at bit p *is* the number 2^(10 - p) + code:

    fp16bits((w >> shift) & (mask << p) | (25 - p) << 10)  ==  bias + code,    bias = 2^(10 - p)

One shift (often none) and one `lop3` convert a pair of codes. The bias is subtracted exactly later,
from a partial dot product or by an fp16 addition. p + bits <= 10, so codes of up to 8 bits fit.

This module imports neither JAX nor NumPy, so that the kernels can share it with
`kvq_jax.arrays.packing`, which packs the codes.
"""

from __future__ import annotations

import dataclasses
import functools
import math

SUPPORTED_BITS = (2, 3, 4, 5, 8)  # of codes that kernels turn into fp16
TABLE_BITS = (2, 3, 4)  # of codes that kernels look up in a table
WORD_BITS = 16
# Tokens over which the slots of a word row are spread. The tiles that kernels read are whole spans.
SPAN = 32


def plane_sets(bits: int) -> tuple[int, ...]:
    """Return the powers of two that add up to `bits`, widest first: 2 -> (2,), 3 -> (2, 1), 9 ->
    (8, 1).
    """
    if not 1 <= bits <= 15:
        raise ValueError(f"{bits=} cannot be packed: 1 to 15 bits fit a 16-bit word")
    return tuple(1 << i for i in reversed(range(4)) if bits >> i & 1)


@dataclasses.dataclass(frozen=True)
class Field:
    """The place of one code, and the constants that make it fp16: (word[tile] >> shift) & mask at
    bit `position`, value bias + code.

    If a code has a bit in a second plane set (3 = 2 + 1 bits, 5 = 4 + 1), that bit is in
    `high_tile`, and shifting it right by `high_shift` puts it above the low bits. Negative shifts
    go left.
    """

    tile: int
    shift: int
    position: int
    bits: int
    high_tile: int | None = None
    high_shift: int = 0

    @property
    def bias(self) -> int:
        return 1 << (10 - self.position)

    @property
    def mask(self) -> int:
        """Return the mask of the low bits, at their position."""
        return ((1 << self.bits) - 1) << self.position

    @property
    def high_mask(self) -> int:
        return 1 << (self.position + self.bits)

    @property
    def exponent(self) -> int:
        return (25 - self.position) << 10


@dataclasses.dataclass(frozen=True)
class PlaneLayout:
    """The places of the codes of a token block. Static and hashable, from `plane_layout`."""

    bits: int  # of a code, all plane sets together
    channels: int  # H as the method sees it
    chunks: int  # c, stored chunks per token, padding included
    width: int  # W
    slots: int  # n, tokens that share a word row
    span: int = SPAN  # P, tokens over which the slots are spread

    @property
    def sets(self) -> tuple[int, ...]:
        """Return the bits of each plane set, the low bits first."""
        return plane_sets(self.bits)

    def tiles(self, set_bits: int) -> int:
        """Return the number of W-wide tiles in a word row of the plane set with `set_bits` bits."""
        return self.slots * self.chunks * set_bits // WORD_BITS

    def words(self, set_bits: int) -> int:
        """Return the number of words in one row of that plane set."""
        return self.tiles(set_bits) * self.width

    def field(self, slot: int, chunk: int) -> Field:
        """Return the place of chunk `chunk` of token slot `slot`."""
        return _field(self, slot * self.chunks + chunk)


@functools.cache
def plane_layout(bits: int, channels: int, block: int) -> PlaneLayout:
    """Return the layout for H channels and blocks of `block` tokens.

    W is 32 if 32-channel chunks fill whole words by themselves, else 16. n is the smallest number
    of tokens whose fields fill whole words of the thinnest plane set. If n does not divide the
    span, tokens are padded with empty chunks instead, and n is the largest divisor of the span that
    helps.
    """
    sets = plane_sets(bits)
    fields = WORD_BITS // sets[-1]
    wide = len(sets) == 1 and channels % 32 == 0 and (channels // 32) % fields == 0
    width = 32 if wide else 16
    chunks = -(-channels // width)
    span = math.gcd(block, SPAN)
    slots = math.gcd(fields // math.gcd(fields, chunks), span)
    unit = fields // math.gcd(fields, slots)
    return PlaneLayout(bits, channels, -(-chunks // unit) * unit, width, slots, span)


@functools.cache
def _field(layout: PlaneLayout, number: int) -> Field:
    low = layout.sets[0]
    index, tile = divmod(number, layout.tiles(low))
    shift, position = _place(low * index, low, layout.bits)
    if len(layout.sets) == 1:
        return Field(tile, shift, position, low)
    index, high_tile = divmod(number, layout.tiles(1))
    return Field(tile, shift, position, low, high_tile, index - (position + low))


def _place(bit: int, low: int, bits: int) -> tuple[int, int]:
    """Return (shift, position) for a field at `bit` of its word. Fields share few shifts, so that
    the compiler shares them too.

    Position 0 means a bias of 1024, which costs a partial dot product three bits more than position
    2. It is used if the field would otherwise need a separate shift.
    """
    if low == 8:
        return bit, 0
    last = 10 - bits
    shifts, lowest = ((0, 6, -4), 2) if bits == 2 else ((0, 8, 4), 0)
    for shift in shifts:
        if lowest <= bit - shift <= last:
            return shift, bit - shift
    raise AssertionError(f"a field at {bit=} of {bits=} fits nowhere")
