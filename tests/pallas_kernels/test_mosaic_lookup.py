"""Look-ups on registers give the entries of the array form, which is all that the interpreter runs:
their assembly, executed in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiles.layout import SPAN, plane_layout
from tests.pallas_kernels.emulator import asm_on_arrays
from tests.pallas_kernels.lowering import needs_mosaic
from tests.pallas_kernels.registers import WARPS, numbers, registers


@needs_mosaic
@pytest.mark.parametrize("tokens", [1, 2], ids=["keys", "values"])
@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_registers_have_the_entries_of_arrays(
    bits: int, channels: int, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    from pallas_kernels.mosaic import table_lookup

    monkeypatch.setattr(table_lookup, "asm", asm_on_arrays)
    layout, rng = plane_layout(bits, channels, SPAN), np.random.default_rng(bits)
    shapes = [(WARPS, SPAN // layout.slots, layout.words(set_bits)) for set_bits in layout.sets]
    words = [rng.integers(-(1 << 15), 1 << 15, shape).astype(np.int16) for shape in shapes]
    words = [np.swapaxes(w, 1, 2) if tokens == 2 else w for w in words]
    numbers_of_table = jnp.asarray(rng.uniform(-1, 1, 1 << bits), jnp.float32)
    table = table_lookup.packed(numbers_of_table)
    arrays = list(map(jnp.asarray, words))
    inside = table_lookup.in_registers(list(numbers_of_table), interpret=True)
    wanted = table_lookup.entries(arrays, layout, inside, tokens, interpret=True)
    of_table = [np.uint32(word) for word in np.asarray(table).view(np.uint32)]
    fields = table_lookup.Fields([registers(w[1]) for w in words], layout, 3 - tokens, of_table)
    for chunk, want in enumerate(wanted):
        slots = [fields.registers(slot, chunk) for slot in range(layout.slots)]
        bits_of_chunk = numbers(np.concatenate(slots, tokens - 1))
        np.testing.assert_array_equal(bits_of_chunk.view(np.float16), want[1], f"chunk {chunk}")
    assert (np.asarray(wanted[0][1]) != np.asarray(wanted[-1][1])).mean() > 0.5, "chunks are alike"


@needs_mosaic
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_kernel_packs_a_table_as_arrays_do(bits: int, monkeypatch: pytest.MonkeyPatch):
    from pallas_kernels.mosaic import table_lookup

    monkeypatch.setattr(table_lookup, "asm", asm_on_arrays)
    table = np.random.default_rng(bits).uniform(-1, 1, 1 << bits).astype(np.float16)
    words = table_lookup.words_of(list(table.view(np.uint32)))
    wanted = np.asarray(table_lookup.packed(jnp.asarray(table)))
    assert [int(word) for word in words] == wanted.view(np.uint32).tolist()
    assert len(set(wanted.tolist())) == len(wanted), "words could be exchanged"
