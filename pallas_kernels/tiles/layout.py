"""Packed words in channel planes, as kernels read them: which bits of which tile hold a code, and how it becomes an fp16 number.

The layout is that of `kvq_jax.arrays.packing` (its facts are passed in as a `Planes`). A row of words is m tiles of W words; bit field i
of tile j holds the W channels of slot-and-chunk number i * m + j (number = slot * chunks + chunk). A field of the tile, masked and
moved, has the shape of the tile: no reshape, no gather.

From bits to fp16 without a conversion. Under the exponent bits (25 - p) << 10 the mantissa bit p of an fp16 number is worth 1. So a code
at bit p there *is* the number 2^(10 - p) + code:

    fp16bits((w >> shift) & (mask << p) | (25 - p) << 10)  ==  bias + code,    bias = 2^(10 - p)

One shift (often none) and one `lop3` convert a pair of codes. The bias is subtracted exactly later: from a partial dot product, or by an
fp16 addition. p + bits <= 10, so codes of up to 8 bits fit.
"""

from __future__ import annotations

import dataclasses
import functools

SUPPORTED_BITS = (2, 3, 4, 5, 8)
WORD = 16


@dataclasses.dataclass(frozen=True)
class Field:
    """Where one code lies, and how it becomes fp16: (word[tile] >> shift) & mask at bit `position`, value bias + code.

    A code with a bit in a second plane set (3 = 2 + 1 bits, 5 = 4 + 1) has it in `high_tile`, to be moved right by `high_shift` to stand
    above the low bits. Negative shifts go left.
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
        """Of the low bits, in place."""
        return ((1 << self.bits) - 1) << self.position

    @property
    def high_mask(self) -> int:
        return 1 << (self.position + self.bits)

    @property
    def exponent(self) -> int:
        return (25 - self.position) << 10


@dataclasses.dataclass(frozen=True)
class Planes:
    """Facts of a packed side: code bits, H channels = chunks * width, `slots` tokens in a word row. Static and hashable."""

    bits: int
    channels: int
    chunks: int
    width: int
    slots: int

    @property
    def sets(self) -> tuple[int, ...]:
        """Bits of each plane set, the low bits first: powers of two, as `kvq_jax.arrays.packing` stores them."""
        return tuple(1 << i for i in reversed(range(4)) if self.bits >> i & 1)

    def tiles(self, set_bits: int) -> int:
        return self.slots * self.chunks * set_bits // WORD

    def field(self, slot: int, chunk: int) -> Field:
        """Where token slot `slot` has its chunk of W channels."""
        return _field(self, slot * self.chunks + chunk)


@functools.cache
def _field(planes: Planes, number: int) -> Field:
    low = planes.sets[0]
    index, tile = divmod(number, planes.tiles(low))
    shift, position = _place(low * index, low, planes.bits)
    if len(planes.sets) == 1:
        return Field(tile, shift, position, low)
    index, high_tile = divmod(number, planes.tiles(1))
    return Field(tile, shift, position, low, high_tile, index - (position + low))


def _place(bit: int, low: int, bits: int) -> tuple[int, int]:
    """(shift, position) for a field at `bit` of its word. Fields share few shifts, so that the compiler shares them too.

    Position 0 means a bias of 1024, which costs a partial dot product three bits more than position 2: used where the field would need
    a shift of its own.
    """
    if low == 8:
        return bit, 0
    last = 10 - bits
    shifts, lowest = ((0, 6, -4), 2) if bits == 2 else ((0, 8, 4), 0)
    for shift in shifts:
        if lowest <= bit - shift <= last:
            return shift, bit - shift
    raise AssertionError(f"a field at {bit=} of {bits=} fits nowhere")
