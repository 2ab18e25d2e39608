"""Pack codes of 1 to 15 bits into int16 words, and unpack them, in the channel planes of
`pallas_kernels.tiles.layout`.

Exact: unpack(pack(codes)) == codes.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int16, Integer, UInt16

from pallas_kernels.tiles.layout import SPAN, WORD_BITS, PlaneLayout, plane_layout, plane_sets

Words = tuple[Int16[Array, "..."], ...]


def run_layout(bits: int, channels: int, block: int) -> PlaneLayout:
    """Return the layout of any number of neighbouring channels without padding.

    Tokens share rows of words, and a plane is the whole run. If blocks hold too few tokens for
    that, it is the layout that kernels read, padding included.
    """
    slots, span = WORD_BITS // plane_sets(bits)[-1], math.gcd(block, SPAN)
    if span % slots:
        return plane_layout(bits, channels, block)
    return PlaneLayout(bits, channels, 1, channels, slots, span)


def pack(codes: Integer[Array, "*batch tokens channels"], layout: PlaneLayout) -> Words:
    """Pack codes into one int16 array [..., T/n, words] for each plane set.

    Args:
        codes: [..., T, H], T a multiple of the layout's span.
    """
    *batch, tokens, channels = codes.shape
    n, c, width, span = layout.slots, layout.chunks, layout.width, layout.span
    padded = jnp.pad(
        codes.astype(jnp.uint16), [(0, 0)] * (len(batch) + 1) + [(0, c * width - channels)]
    )
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
    """Return the codes [..., T, H] of packed words: the inverse of `pack`."""
    *batch, rows, _ = words[0].shape
    n, c, width, span = layout.slots, layout.chunks, layout.width, layout.span
    fields, low_bit = jnp.zeros((), jnp.uint16), 0
    for set_bits, word in zip(layout.sets, words, strict=True):
        count = WORD_BITS // set_bits
        # A multiplication moves a field to the top of its word, and one shift brings it down.
        to_top = np.repeat(
            1 << np.arange(WORD_BITS - set_bits, -1, -set_bits), word.shape[-1]
        ).astype(np.uint16)
        repeated = lax.bitcast_convert_type(_repeat_rows(word, count), jnp.uint16)
        part = (repeated * jnp.broadcast_to(to_top, repeated.shape)) >> np.uint16(
            WORD_BITS - set_bits
        )
        fields = part if low_bit == 0 else fields | (part << np.uint16(low_bit))
        low_bit += set_bits
    if n == 1:
        return fields[..., : layout.channels]
    slotted = fields.reshape(*batch, rows * n // span, span // n, n, c * width)
    tokens = jnp.swapaxes(slotted, -3, -2).reshape(*batch, rows * n, c * width)
    return tokens[..., : layout.channels]


def _repeat_rows(
    word: Int16[Array, "*batch rows words"], count: int
) -> Int16[Array, "*batch rows fields"]:
    """Repeat every row of words `count` times: one entry for each field.

    A concatenation, because XLA's CPU backend keeps one apart, so that the unpacking of a field
    becomes one long vectorized loop. Rows too short for that (under 256 bytes) are joined with
    their neighbours first (docs/decisions/streaming_attention.md).
    """
    *batch, rows, width = word.shape
    joined = 1
    while joined * width * count < 128 and rows % (2 * joined) == 0:
        joined *= 2
    wide = word.reshape(*batch, rows // joined, joined * width)
    pieces = [wide[..., i * width : (i + 1) * width] for i in range(joined) for _ in range(count)]
    return jnp.concatenate(pieces, axis=-1).reshape(*batch, rows, count * width)
