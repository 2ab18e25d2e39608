"""The bit tricks of planes.py, over every word: in NumPy, on the very numbers from which the assembly is written."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.packing import pack, plane_layout, unpack
from pallas_kernels.planes import SUPPORTED_BITS, Field, Planes, codes

WORDS = np.arange(65536, dtype=np.uint32)


def planes(bits: int, channels: int) -> Planes:
    layout = plane_layout(bits, channels, 32)
    return Planes(layout.bits, layout.channels, layout.chunks, layout.plane, layout.slots)


def fields(p: Planes) -> list[Field]:
    return [p.field(slot, chunk) for slot in range(p.slots) for chunk in range(p.chunks)]


def moved(pair: np.ndarray, shift: int) -> np.ndarray:
    return pair >> np.uint32(shift) if shift >= 0 else (pair << np.uint32(-shift)) & np.uint32(0xFFFFFFFF)


def lop3(a: np.ndarray, b: int, c: np.ndarray | int) -> np.ndarray:
    return (a & np.uint32(b)) | np.uint32(c)


def halves(pair: np.ndarray) -> list[np.ndarray]:
    return [(pair >> np.uint32(16 * i) & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16) for i in (0, 1)]


def twice(constant: int) -> int:
    return constant << 16 | constant


@pytest.mark.parametrize("bits", [b for b in SUPPORTED_BITS if b != 8])
def test_a_shift_and_a_lop3_make_bias_plus_code_of_every_pair_of_words(bits):
    """The 32-bit register holds two words; what a shift brings over from one into the other is masked off."""
    p = planes(bits, 64)
    low_bits = p.sets[0]
    neighbours = WORDS[::-1] * 40503 % 65536  # every word beside some other one
    pair = WORDS | neighbours << np.uint32(16)
    for field in set(fields(p)):
        index = (field.position + field.shift) // low_bits
        assert field.position + field.shift == low_bits * index, f"{field} does not lie on a field of the word"
        high = WORDS[::-1] | WORDS << np.uint32(16)
        register = lop3(moved(pair, field.shift), twice(field.mask), twice(field.exponent))
        if field.high_tile is not None:
            register = lop3(moved(high, field.high_shift), twice(field.high_mask), register)
        for half, (word, top) in zip(halves(register), ((WORDS, WORDS[::-1]), (neighbours, WORDS)), strict=True):
            code = word >> np.uint32(low_bits * index) & np.uint32((1 << low_bits) - 1)
            if field.high_tile is not None:
                bit = field.high_shift + field.position + low_bits
                code = code | (top >> np.uint32(bit) & np.uint32(1)) << np.uint32(low_bits)
            assert (half == (code + field.bias).astype(np.float16)).all(), f"{bits=}, {field}"
            assert not (half == (code + field.bias + 1).astype(np.float16)).any()


def test_byte_permutation_makes_bias_plus_code_of_every_pair_of_words():
    for index in (0, 1):
        selector = 0x4 << 12 | (2 + index) << 8 | 0x4 << 4 | index
        neighbours = WORDS[::-1]
        source = np.stack(
            [*(WORDS >> np.uint32(8 * i) & np.uint32(255) for i in (0, 1))]
            + [neighbours >> np.uint32(8 * i) & np.uint32(255) for i in (0, 1)]
        )
        table = np.concatenate([source, np.full((4, WORDS.size), 0x64, np.uint32)])
        chosen = [table[selector >> 4 * i & 7] for i in range(4)]
        register = sum(byte.astype(np.uint32) << np.uint32(8 * i) for i, byte in enumerate(chosen))
        for half, word in zip(halves(np.asarray(register, np.uint32)), (WORDS, neighbours), strict=True):
            assert (half == (1024 + (word >> np.uint32(8 * index) & np.uint32(255))).astype(np.float16)).all()


@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_fields_find_the_codes_that_packing_stored(bits, channels):
    layout, p = plane_layout(bits, channels, 32), planes(bits, channels)
    stored = np.random.default_rng(bits).integers(0, 1 << bits, (64, channels))
    words = pack(jnp.asarray(stored, jnp.uint8), layout)
    assert (np.asarray(unpack(words, layout)) == stored).all()
    tiles = [[w[:, p.width * j : p.width * (j + 1)] for j in range(p.tiles(b))] for w, b in zip(words, p.sets, strict=True)]
    run = 32 // p.slots
    for slot in range(p.slots):
        token = np.arange(64 // p.slots)
        token = token // run * 32 + run * slot + token % run
        for chunk in range(p.chunks):
            field = p.field(slot, chunk)
            found = np.asarray(codes(tiles[0], tiles[1] if len(tiles) == 2 else [], field, asm=False), np.float32) - field.bias
            assert (found == stored[token][:, p.width * chunk : p.width * (chunk + 1)]).all(), f"{bits=} {channels=} {slot=} {chunk=}"


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_fields_share_few_shifts(bits):
    """Each different shift costs an instruction for every pair of words."""
    found = {field.shift for field in fields(planes(bits, 128))} - {0}
    assert len(found) <= 2, f"{bits=}: shifts {found}"
