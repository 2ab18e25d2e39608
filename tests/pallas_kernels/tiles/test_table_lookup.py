"""Readers that look codes up in tables, interpreted, against plain sums over the rows that the same
codes stand for; their lowering; and their assembly, executed one instruction after the other in
NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.packing import pack, unpack
from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.tiles import table_lookup
from pallas_kernels.tiles.halves import joined
from pallas_kernels.tiles.layout import plane_layout
from pallas_kernels.tiles.words import Bit, SingleWords, paired
from tests.exhaustive import some
from tests.pallas_kernels.kernel_cases import row_errors
from tests.pallas_kernels.lowering import lower_for_cuda

BATCH, HEADS, GROUP, CAPACITY = 1, 2, 4, 256
TUNING = Tuning(tile=128, cores=BATCH * HEADS, resident=1)
INTERPRETED = Launch(interpret=True)
TOLERANCE = 2e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """A reader, and how its stored arrays are made. shared: all heads have the scales of a token
    together."""

    id: str
    reader: CodebookReader
    shared: bool = False

    @property
    def head_dim(self) -> int:
        count, width = self.reader.chunks
        return count * width


def codebook(
    bits: int,
    head_dim: int,
    affine: Any,
    group: int | None = None,
    shared: bool = False,
    dtype: str = "float16",
) -> Case:
    name = f"codebook{bits}_h{head_dim}_{affine}_{group}{'_shared' if shared else ''}"
    return Case(
        name,
        CodebookReader(plane_layout(bits, head_dim, 32), affine, group or head_dim, dtype),
        shared,
    )


CASES = (
    codebook(2, 64, "tokens", shared=True),
    codebook(2, 128, "channels"),
    codebook(3, 64, "tokens", 32, dtype="bfloat16"),
    codebook(3, 128, "channels"),
    codebook(4, 64, "tokens", 64, shared=True, dtype="float32"),
    codebook(4, 128, "tokens", 32, shared=True),
    codebook(4, 256, "channels"),
)
each = pytest.mark.parametrize("case", some(CASES, CASES[::3]), ids=lambda case: case.id)


def arrays(case: Case, seed: int = 0) -> list[np.ndarray]:
    """Make what a cache would store: words, then the reader's other arrays; 16-bit scales and zero
    points as their bits."""
    rng, reader = np.random.default_rng(seed), case.reader
    codes = rng.integers(
        0, 1 << reader.layout.bits, (BATCH, HEADS, CAPACITY, reader.layout.channels)
    )
    words = [np.asarray(w) for w in pack(jnp.asarray(codes, jnp.uint8), reader.layout)]
    found = [rng.standard_normal(1 << reader.layout.bits).astype(np.float32)]
    ranges = [(0.5, 1.5), (-1.0, 1.0)]
    if reader.affine == "channels":
        return [
            *words,
            *found,
            *(rng.uniform(*r, (HEADS, case.head_dim)).astype(np.float32) for r in ranges),
        ]
    scales_shape = (BATCH, 1 if case.shared else HEADS, case.head_dim // reader.group, CAPACITY)
    scales = [jnp.asarray(rng.uniform(*r, scales_shape), reader.scale_dtype) for r in ranges]
    if reader.scale_dtype == "float32":
        return [*words, *found, *map(np.asarray, scales)]
    return [
        *words,
        *found,
        *(np.asarray(jax.lax.bitcast_convert_type(s, jnp.uint16)) for s in scales),
    ]


def rows(case: Case, stored: list[np.ndarray]) -> np.ndarray:
    """Return the vectors [B, K, S, H] that stored arrays stand for, in float64."""
    reader = case.reader
    sets = len(reader.layout.sets)
    layout = reader.layout
    codes = np.asarray(unpack(tuple(map(jnp.asarray, stored[:sets])), layout)).astype(np.int64)
    floats = [
        (
            a
            if a.dtype != np.uint16
            else np.asarray(jnp.asarray(a).view(reader.scale_dtype), np.float64)
        )
        for a in stored[sets:]
    ]
    table, *scales = floats
    if reader.affine == "channels":
        scale, zero = (s[:, None] for s in scales)
    else:
        scale, zero = (np.repeat(np.swapaxes(s, 2, 3), reader.group, axis=3) for s in scales)
    return np.asarray(table, np.float64)[codes] * scale + zero


@functools.partial(jax.jit, static_argnames=("reader", "launch"))
def scores(reader: Reader, q: jax.Array, stored: list[jax.Array], launch: Launch) -> jax.Array:
    return matvec.scores(q, reader, stored, capacity=CAPACITY, tuning=TUNING, launch=launch)


@functools.partial(jax.jit, static_argnames=("reader", "launch"))
def weighted_values(
    reader: Reader, p: jax.Array, stored: list[jax.Array], launch: Launch
) -> jax.Array:
    return matvec.weighted_values(p, reader, stored, tuning=TUNING, launch=launch)


def query(case: Case) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(8).standard_normal((BATCH, HEADS, GROUP, case.head_dim)), jnp.float32
    )


def weights() -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(9).random((BATCH, HEADS, GROUP, CAPACITY)), jnp.float32
    )


def shifted(case: Case, stored: list[np.ndarray]) -> list[np.ndarray]:
    """Return the stored arrays with the scales shifted by one channel or token."""
    found, at = list(stored), len(case.reader.layout.sets) + 1
    found[at] = np.roll(stored[at], 1, axis=-1)
    return found


def check_scores(case: Case, launch: Launch) -> None:
    q, stored = query(case), arrays(case)
    found = scores(case.reader, q, stored, launch)

    def error(rows_: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgh,bksh->bkgs", q, rows_)).max()

    assert error(rows(case, stored)) < TOLERANCE
    assert error(np.roll(rows(case, stored), 1, axis=2)) > 0.1, (
        "the scores of the tokens before would pass"
    )
    assert error(rows(case, shifted(case, stored))) > 10 * TOLERANCE, "a shifted scale would pass"


def check_values(case: Case, launch: Launch) -> None:
    p, stored = weights(), arrays(case)
    found = weighted_values(case.reader, p, stored, launch)

    def error(rows_: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgs,bksh->bkgh", p, rows_)).max()

    assert error(rows(case, stored)) < TOLERANCE
    assert error(np.roll(rows(case, stored), 1, axis=2)) > 10 * TOLERANCE, (
        "the values of the tokens before would pass"
    )
    assert error(rows(case, shifted(case, stored))) > 10 * TOLERANCE, "a shifted scale would pass"


@each
def test_scores_equal_the_reference_on_the_same_codes(case):
    check_scores(case, INTERPRETED)


@each
def test_weighted_values_equal_the_reference_on_the_same_codes(case):
    check_values(case, INTERPRETED)


def test_tables_of_other_sizes_are_refused():
    case = codebook(2, 64, "tokens")
    words, _, *scales = arrays(case)
    with pytest.raises(ValueError, match=r"the table has 4 entries"):
        scores(case.reader, query(case), [words, np.zeros(8, np.float32), *scales], INTERPRETED)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_table_lowers_for_cuda(case, arithmetic):
    stored = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays(case)]
    text = lower_for_cuda(
        lambda *a: scores(case.reader, a[0], list(a[1:]), Launch(arithmetic)), query(case), *stored
    )
    assert "matvec_scores" in text
    text = lower_for_cuda(
        lambda *a: weighted_values(case.reader, a[0], list(a[1:]), Launch(arithmetic)),
        weights(),
        *stored,
    )
    assert "matvec_values" in text


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_table_runs_on_a_gpu(case, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_scores(case, Launch(arithmetic))
    check_values(case, Launch(arithmetic))


# ---- the assembly, in NumPy (emulator.py) ----


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize(
    "positions", [(0, 1), (14, 15), (3, 8, 15), (4, 5, 6, 7), (12, 13, 14, 15)]
)
def test_codes_become_entries_and_numbers(positions):
    """For every word, beside some other one in its register: bit for bit."""
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

    wanted, neighbour = (entries[c].view(np.uint16) for c in (code, code ^ 1))
    assert (neighbour != wanted).mean() > 0.9
    for words in in_pairs:
        found = table_lookup.chosen(
            words, bits, table_lookup.Table.read(jnp.asarray(entries), asm=False).entries
        )
        np.testing.assert_array_equal(
            np.asarray(joined(found)).view(np.uint16), wanted, err_msg=f"{words.axis=}"
        )

    for words in (SingleWords(tiles), *in_pairs):
        found, bias = words.number(bits)
        np.testing.assert_array_equal(np.asarray(joined(found), np.float32) - bias, code)


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize(
    ("bits", "channels"), [(2, 128), (2, 64), (3, 128), (3, 64), (4, 128), (4, 256)]
)
def test_tables_are_looked_up_exactly_in_assembly(bits, channels):
    """Random words, bit for bit: every slot and chunk."""
    layout, rng = plane_layout(bits, channels, 32), np.random.default_rng(bits)
    tokens = 32
    codes = rng.integers(0, 1 << bits, (tokens, channels))
    stored = [
        np.asarray(w) for w in pack(jnp.asarray(codes, jnp.uint8), plane_layout(bits, channels, 32))
    ]
    tiles = [
        [
            jnp.asarray(w[:, layout.width * j : layout.width * (j + 1)])
            for j in range(w.shape[1] // layout.width)
        ]
        for w in stored
    ]
    entries = rng.standard_normal(1 << bits).astype(np.float16)
    looked = table_lookup.LookedUp.of(
        SingleWords(tiles), layout, table_lookup.Table.read(jnp.asarray(entries), asm=True)
    )
    run = tokens // layout.slots
    for slot in range(layout.slots):
        for chunk in range(layout.chunks):
            found = np.asarray(looked.plane(slot, chunk)).view(np.uint16)
            wanted = entries[
                codes[
                    run * slot : run * (slot + 1), layout.width * chunk : layout.width * (chunk + 1)
                ]
            ].view(np.uint16)
            np.testing.assert_array_equal(found, wanted, err_msg=f"{slot=} {chunk=}")
            assert (found != np.roll(wanted, 1, axis=1)).any()
