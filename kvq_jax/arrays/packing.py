"""Codes of 2, 3, 4 or 8 bits packed into int16 words as channel planes.

A row of H channels is cut into c = H/W chunks of W neighbouring channels. The W words of a *tile* hold, in bit field i, the codes of one
whole chunk: so unpacking a field of a tile is one shift and one mask, and the result (a *plane*) has the tile's shape. Where one token
does not fill whole words, n tokens share a row of words. In every span of P tokens, word row r holds tokens r, P/n + r, 2P/n + r, ...:
slot a of row r is token a * P/n + r, so each slot of a span is a run of neighbouring tokens.

A row of words is m tiles wide, m = n * c * bits / 16. Field i of tile j holds slot and chunk number i * m + j, counted slot-major (number
= slot * c + chunk). So field i of the whole row, m * W words, is one run of neighbouring channels: wide planes for a CPU, W-wide tiles for
a GPU.

Codes whose width is not a power of two are split into plane sets, low bits first: 3 = 2 + 1, 5 = 4 + 1, 9 = 8 + 1. Exact:
unpack(pack(codes)) == codes. Head dims that are not a multiple of 16 are padded with zero codes up to one, and the padding is stored (and
counted).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int16, Integer, UInt16

WORD_BITS = 16
SPAN_TOKENS = 32
Words = tuple[Int16[Array, "..."], ...]


def plane_sets(bits: int) -> tuple[int, ...]:
    """Powers of two that add up to `bits`, widest first: 2 -> (2,), 3 -> (2, 1), 9 -> (8, 1)."""
    if not 1 <= bits <= 15:
        raise ValueError(f"{bits=} cannot be packed: 1 to 15 bits fit a 16-bit word")
    return tuple(1 << i for i in reversed(range(4)) if bits >> i & 1)


@dataclasses.dataclass(frozen=True)
class PlaneLayout:
    """Where each code of a token block is stored. Static and hashable; derive it with `plane_layout`."""

    bits: int  # per code, all plane sets together
    channels: int  # H as the method sees it
    chunks: int  # c, stored chunks per token, padding included
    plane: int  # W
    slots: int  # n, tokens that share a word row
    span: int  # P, tokens over which the slots are spread

    @property
    def sets(self) -> tuple[int, ...]:
        return plane_sets(self.bits)

    def tiles(self, set_bits: int) -> int:
        """W-wide tiles in one word row of the plane set with `set_bits` bits."""
        return self.slots * self.chunks * set_bits // WORD_BITS

    def words(self, set_bits: int) -> int:
        """Words in one row of that plane set."""
        return self.tiles(set_bits) * self.plane


@functools.cache
def plane_layout(bits: int, channels: int, block: int) -> PlaneLayout:
    """The layout for H channels and blocks of `block` tokens.

    W is 32 where 32-channel chunks fill whole words by themselves, else 16. n is the smallest number of tokens whose fields fill whole
    words of the thinnest plane set; where n does not divide the span, tokens are padded with empty chunks instead, and n is the largest
    divisor of the span that helps.
    """
    sets = plane_sets(bits)
    fields = WORD_BITS // sets[-1]
    wide = len(sets) == 1 and channels % 32 == 0 and (channels // 32) % fields == 0
    plane = 32 if wide else 16
    chunks = -(-channels // plane)
    span = math.gcd(block, SPAN_TOKENS)
    slots = math.gcd(fields // math.gcd(fields, chunks), span)
    unit = fields // math.gcd(fields, slots)
    return PlaneLayout(bits, channels, -(-chunks // unit) * unit, plane, slots, span)


def pack(codes: Integer[Array, "*batch tokens channels"], layout: PlaneLayout) -> Words:
    """Packs codes [..., T, H] (T a multiple of the layout's span) into one int16 array [..., T/n, words] for each plane set."""
    *batch, tokens, channels = codes.shape
    n, c, width, span = layout.slots, layout.chunks, layout.plane, layout.span
    padded = jnp.pad(codes.astype(jnp.uint16), [(0, 0)] * (len(batch) + 1) + [(0, c * width - channels)])
    slotted = padded.reshape(*batch, tokens // span, n, span // n, c, width)
    fields = jnp.swapaxes(slotted, -4, -3).reshape(*batch, tokens // n, n * c, width)
    words, low_bit = [], 0
    for set_bits in layout.sets:
        tiles = layout.tiles(set_bits)
        part = (fields >> np.uint16(low_bit)) & np.uint16((1 << set_bits) - 1)
        part = part.reshape(*batch, tokens // n, WORD_BITS // set_bits, tiles * width)
        shifts = (set_bits * np.arange(WORD_BITS // set_bits, dtype=np.uint16))[:, None]
        word = jnp.sum(part << jnp.broadcast_to(shifts, part.shape), axis=-2, dtype=jnp.uint16)
        words.append(lax.bitcast_convert_type(word, jnp.int16))
        low_bit += set_bits
    return tuple(words)


def unpack(words: Words, layout: PlaneLayout) -> UInt16[Array, "*batch tokens channels"]:
    """The codes [..., T, H] uint16 of packed words: the inverse of `pack`."""
    *batch, rows, _ = words[0].shape
    n, c, width, span = layout.slots, layout.chunks, layout.plane, layout.span
    fields, low_bit = jnp.zeros((), jnp.uint16), 0
    for set_bits, word in zip(layout.sets, words, strict=True):
        count = WORD_BITS // set_bits
        # a multiplication moves a field to the top of its word, one shift brings it down: no mask
        to_top = np.repeat(1 << np.arange(WORD_BITS - set_bits, -1, -set_bits), word.shape[-1]).astype(np.uint16)
        repeated = lax.bitcast_convert_type(_repeat_rows(word, count), jnp.uint16)
        part = (repeated * jnp.broadcast_to(to_top, repeated.shape)) >> np.uint16(WORD_BITS - set_bits)
        fields = part if low_bit == 0 else fields | (part << np.uint16(low_bit))
        low_bit += set_bits
    if n == 1:
        return fields[..., : layout.channels]
    slotted = fields.reshape(*batch, rows * n // span, span // n, n, c * width)
    tokens = jnp.swapaxes(slotted, -3, -2).reshape(*batch, rows * n, c * width)
    return tokens[..., : layout.channels]


def _repeat_rows(word: Int16[Array, "*batch rows words"], count: int) -> Int16[Array, "*batch rows fields"]:
    """Every row of words `count` times in a row: one entry for each field.

    Written as a concatenation because XLA's CPU backend keeps one apart, so that the unpacking of a field becomes one long vectorized
    loop; rows too short for that (under 256 bytes) are joined with their neighbours first (docs/decisions.md).
    """
    *batch, rows, width = word.shape
    joined = 1
    while joined * width * count < 128 and rows % (2 * joined) == 0:
        joined *= 2
    wide = word.reshape(*batch, rows // joined, joined * width)
    pieces = [wide[..., i * width : (i + 1) * width] for i in range(joined) for _ in range(count)]
    return jnp.concatenate(pieces, axis=-1).reshape(*batch, rows, count * width)
