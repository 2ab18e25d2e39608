"""Codes of 2, 3 and 4 bits become the entries of their table, bit for bit: in array operations, and
in assembly, executed in NumPy (emulator.py).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.packing import pack
from pallas_kernels.tiles import table_lookup
from pallas_kernels.tiles.halves import joined
from pallas_kernels.tiles.layout import plane_layout
from pallas_kernels.tiles.words import Bit, SingleWords, paired


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize("positions", [(0, 1), (3, 8, 15), (12, 13, 14, 15)])
def test_codes_become_entries_and_numbers(positions):
    """Look up every word, beside some other one in its register."""
    everything = np.arange(65536, dtype=np.uint32)
    pairs = (
        np.stack([everything, everything[::-1] * 40503 % 65536], axis=-1)
        .astype(np.uint16)
        .view(np.int16)
        .reshape(4096, 32)
    )
    tiles, bits = [[jnp.asarray(pairs)]], [Bit(0, 0, p) for p in positions]
    in_pairs = [paired(tiles, axis, jnp.asarray(64)) for axis in (0, 1)]
    code = sum((pairs.view(np.uint16) >> p & 1) << i for i, p in enumerate(positions))
    entries = np.random.default_rng(0).standard_normal(1 << len(bits)).astype(np.float16)

    expected, neighbour = (entries[c].view(np.uint16) for c in (code, code ^ 1))
    assert (neighbour != expected).mean() > 0.9
    for words in in_pairs:
        table = table_lookup.LookupTable.read(jnp.asarray(entries), asm=False)
        actual = np.asarray(joined(table_lookup.chosen(words, bits, table.entries)))
        np.testing.assert_array_equal(actual.view(np.uint16), expected, err_msg=f"{words.axis=}")

    for words in (SingleWords(tiles), *in_pairs):
        numbers, bias = words.number(bits)
        np.testing.assert_array_equal(np.asarray(joined(numbers), np.float32) - bias, code)


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize(("bits", "channels"), [(2, 64), (3, 128), (4, 256)])
def test_tables_are_looked_up_exactly_in_assembly(bits, channels):
    """Look up random words in every slot and chunk."""
    layout, rng = plane_layout(bits, channels, 32), np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (32, channels))
    width, run = layout.width, 32 // layout.slots
    tiles = [
        [words[:, width * j : width * (j + 1)] for j in range(words.shape[1] // width)]
        for words in pack(jnp.asarray(codes, jnp.uint8), layout)
    ]
    entries = rng.standard_normal(1 << bits).astype(np.float16)
    table = table_lookup.LookupTable.read(jnp.asarray(entries), asm=True)
    looked_up = table_lookup.LookedUp.of(SingleWords(tiles), layout, table)
    for slot in range(layout.slots):
        for chunk in range(layout.chunks):
            part = codes[run * slot : run * (slot + 1), width * chunk : width * (chunk + 1)]
            expected = entries[part].view(np.uint16)
            actual = np.asarray(looked_up.plane(slot, chunk)).view(np.uint16)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{slot=} {chunk=}")
            assert (actual != np.roll(expected, 1, axis=1)).any()
