"""Codes of packed words as fp16 numbers, and operations on them, in array operations and in
assembly, executed in NumPy (emulator.py).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.readers.rotary import rotated
from pallas_kernels.tiles.arithmetic import half_multiply_add, subtract_scale, subtract_scale_add
from pallas_kernels.tiles.halves import Halves, joined
from pallas_kernels.tiles.layout import SUPPORTED_BITS, plane_layout
from pallas_kernels.tiles.words import SingleWords, paired

START = jnp.asarray(64)  # of a tile


def tile(seed: int) -> np.ndarray:
    """Return every word, in some order, beside another one in its 32-bit register: [4096, 32]."""
    rng = np.random.default_rng(seed)
    return (
        np.stack([rng.permutation(65536) for _ in range(2)], axis=-1)
        .astype(np.uint16)
        .reshape(4096, 32)
    )


def swapped(pairs: np.ndarray) -> np.ndarray:
    """Return the two halves of every register exchanged."""
    return pairs.reshape(-1, 2)[:, ::-1].reshape(pairs.shape)


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_field_of_every_pair_of_words_becomes_bias_plus_code(bits):
    """Test assembly and array operations. Bits that a shift moves from one half of a register into
    the other are masked off.
    """
    p = plane_layout(bits, 64, 32)
    words = [tile(i) for i in range(len(p.sets))]
    tiles = [
        [jnp.asarray(w.view(np.int16))] * p.tiles(b) for w, b in zip(words, p.sets, strict=True)
    ]
    readers = {
        "asm": SingleWords(tiles),
        "rows in pairs": paired(tiles, 0, START),
        "channels in pairs": paired(tiles, 1, START),
    }
    for number in range(p.slots * p.chunks):
        field, code, above = (
            p.field(*divmod(number, p.chunks)),
            np.zeros(words[0].shape, np.uint16),
            0,
        )
        for w, b in zip(words, p.sets, strict=True):
            code |= (w >> b * (number // p.tiles(b)) & (1 << b) - 1) << above
            above += b
        for name, reader in readers.items():
            actual = np.asarray(joined(reader.codes(field)))
            assert actual.dtype == np.float16
            assert (actual == field.bias + code).all(), f"{name}, {field}"
            assert (actual != field.bias + swapped(code)).mean() > 0.7, (
                "words in each other's place would pass"
            )
            if len(tiles) == 2:
                exchanged = dataclasses.replace(
                    reader, tiles=[reader.tiles[1] * p.tiles(p.sets[0]), reader.tiles[0]]
                )
                other = np.asarray(joined(exchanged.codes(field)))
                assert (other != actual).mean() > 0.7, "plane sets in each other's place would pass"


def halves(seed: int) -> np.ndarray:
    """Return fp16 numbers of all magnitudes and both signs, including zeros and subnormals, whose
    products do not overflow: [256, 32].
    """
    rng = np.random.default_rng(seed)
    actual = rng.normal(size=(256, 32)) * 2.0 ** rng.integers(-14, 6, (256, 32))
    actual[rng.random(actual.shape) < 0.05] = 0
    return actual.astype(np.float16)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16)


@pytest.mark.usefixtures("assembler")
def test_assembly_rounds_once_where_array_operations_round_after_each():
    code = np.random.default_rng(0).integers(0, 256, (256, 32)).astype(np.float64)
    h, x, y, cos, sin = code + 1024, *(halves(seed).astype(np.float64) for seed in range(1, 5))
    on_arrays = [jnp.asarray(half(a)) for a in (h, x, y, cos, sin)]

    def check(name, operation, once: np.ndarray, twice: np.ndarray | None = None) -> None:
        np.testing.assert_array_equal(
            operation(*on_arrays, True), half(once), err_msg=f"{name} in assembly"
        )
        for axis in (0, 1):
            first, *rest = [Halves.of(on_arrays[0], axis), *on_arrays[1:]]
            actual = joined(operation(first, *rest, False))
            np.testing.assert_array_equal(
                actual, half(once if twice is None else twice), err_msg=f"{name}, {axis=}"
            )
        assert (half(once) != half(once)[::-1]).mean() > 0.9, f"{name}: other operands would pass"
        if twice is not None:
            assert (half(once) != half(twice)).any(), (
                f"{name}: nothing here depends on the roundings"
            )

    check(
        "(h - 1031) x", lambda h, x, y, c, s, asm: subtract_scale(h, 1031.0, x, asm), (h - 1031) * x
    )
    check(
        "(h - 1031) x + y",
        lambda h, x, y, c, s, asm: subtract_scale_add(h, 1031.0, x, y, asm),
        (h - 1031) * x + y,
        half((h - 1031) * x) + y,
    )
    check(
        "x y + c",
        lambda h, x, y, c, s, asm: half_multiply_add(x, y, c, asm),
        x * y + cos,
        half(x * y) + cos,
    )
    first, second = (lambda h, x, y, c, s, asm, i=i: rotated(x, y, c, s, asm)[i] for i in (0, 1))
    check(
        "x cos - y sin",
        first,
        x * cos - half(y * sin),
        half(x * cos) - half(y * sin).astype(np.float64),
    )
    check(
        "y cos + x sin",
        second,
        y * cos + half(x * sin),
        half(y * cos) + half(x * sin).astype(np.float64),
    )
