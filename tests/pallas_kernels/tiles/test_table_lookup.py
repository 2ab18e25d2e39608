"""Codes of 2, 3 and 4 bits become the entries of their table, bit for bit: in array operations, and
in assembly, executed in NumPy (emulator.py).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiles import table_lookup
from pallas_kernels.tiles.halves import joined
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
