"""Sides that look codes up in tables, interpreted, against plain sums over the rows that the same codes stand for; their lowering; and
their assembly, executed one instruction after the other in NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.packing import pack, plane_layout, unpack
from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Side
from pallas_kernels.readers.codebook import Codebook
from pallas_kernels.tiles import table_lookup
from pallas_kernels.tiles.arithmetic import joined
from pallas_kernels.tiles.layout import Planes
from pallas_kernels.tiles.words import Bit, SingleWords, paired
from tests.pallas_kernels.kernel_cases import row_errors
from tests.pallas_kernels.lowering import lower_for_cuda

BATCH, HEADS, GROUP, CAPACITY = 1, 2, 4, 256
TUNING = Tuning(tile=128, cores=BATCH * HEADS, resident=1)
INTERPRETED = Launch(interpret=True)
TOLERANCE = 2e-3


def planes(bits: int, channels: int) -> Planes:
    layout = plane_layout(bits, channels, 32)
    return Planes(layout.bits, layout.channels, layout.chunks, layout.plane, layout.slots)


@dataclasses.dataclass(frozen=True)
class Case:
    """A side, and how its stored arrays are made. shared: all heads have the statistics of a token together."""

    id: str
    side: Codebook
    shared: bool = False

    @property
    def head_dim(self) -> int:
        count, width = self.side.chunks
        return count * width


def codebook(bits: int, head_dim: int, affine: Any, group: int | None = None, shared: bool = False, dtype: str = "float16") -> Case:
    name = f"codebook{bits}_h{head_dim}_{affine}_{group}{'_shared' if shared else ''}"
    return Case(name, Codebook(planes(bits, head_dim), affine, group or head_dim, dtype), shared)


CASES = (
    codebook(2, 64, "tokens", shared=True),
    codebook(2, 128, "channels"),
    codebook(3, 64, "tokens", 32, dtype="bfloat16"),
    codebook(3, 128, "channels"),
    codebook(4, 64, "tokens", 64, shared=True, dtype="float32"),
    codebook(4, 128, "tokens", 32, shared=True),
    codebook(4, 256, "channels"),
)
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def arrays(case: Case, seed: int = 0) -> list[np.ndarray]:
    """What a cache would store: words, then the side's other arrays; 16-bit floats of statistics as their bits."""
    rng, side = np.random.default_rng(seed), case.side
    codes = rng.integers(0, 1 << side.planes.bits, (BATCH, HEADS, CAPACITY, side.planes.channels))
    words = [np.asarray(w) for w in pack(jnp.asarray(codes, jnp.uint8), plane_layout(side.planes.bits, side.planes.channels, 32))]
    found = [rng.standard_normal(1 << side.planes.bits).astype(np.float32)]
    ranges = [(0.5, 1.5), (-1.0, 1.0)]
    if side.affine == "channels":
        return [*words, *found, *(rng.uniform(*r, (HEADS, case.head_dim)).astype(np.float32) for r in ranges)]
    statistics_shape = (BATCH, 1 if case.shared else HEADS, case.head_dim // side.group, CAPACITY)
    statistics = [jnp.asarray(rng.uniform(*r, statistics_shape), side.scale_dtype) for r in ranges]
    if side.scale_dtype == "float32":
        return [*words, *found, *map(np.asarray, statistics)]
    return [*words, *found, *(np.asarray(jax.lax.bitcast_convert_type(s, jnp.uint16)) for s in statistics)]


def rows(case: Case, stored: list[np.ndarray]) -> np.ndarray:
    """The vectors [B, K, S, H] that stored arrays stand for, in float64."""
    side = case.side
    sets = len(side.planes.sets)
    layout = plane_layout(side.planes.bits, side.planes.channels, 32)
    codes = np.asarray(unpack(tuple(map(jnp.asarray, stored[:sets])), layout)).astype(np.int64)
    floats = [a if a.dtype != np.uint16 else np.asarray(jnp.asarray(a).view(side.scale_dtype), np.float64) for a in stored[sets:]]
    table, *statistics = floats
    if side.affine == "channels":
        scale, zero = (s[:, None] for s in statistics)
    else:
        scale, zero = (np.repeat(np.swapaxes(s, 2, 3), side.group, axis=3) for s in statistics)
    return np.asarray(table, np.float64)[codes] * scale + zero


@functools.partial(jax.jit, static_argnames=("side", "how"))
def scores(side: Side, q: jax.Array, stored: list[jax.Array], how: Launch) -> jax.Array:
    return matvec.scores(q, side, stored, capacity=CAPACITY, tuning=TUNING, how=how)


@functools.partial(jax.jit, static_argnames=("side", "how"))
def weighted_values(side: Side, p: jax.Array, stored: list[jax.Array], how: Launch) -> jax.Array:
    return matvec.weighted_values(p, side, stored, tuning=TUNING, how=how)


def query(case: Case) -> jax.Array:
    return jnp.asarray(np.random.default_rng(8).standard_normal((BATCH, HEADS, GROUP, case.head_dim)), jnp.float32)


def weights() -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).random((BATCH, HEADS, GROUP, CAPACITY)), jnp.float32)


def shifted(case: Case, stored: list[np.ndarray]) -> list[np.ndarray]:
    """The first statistic shifted by one channel or token."""
    found, at = list(stored), len(case.side.planes.sets) + 1
    found[at] = np.roll(stored[at], 1, axis=-1)
    return found


def check_scores(case: Case, how: Launch) -> None:
    q, stored = query(case), arrays(case)
    found = scores(case.side, q, stored, how)

    def error(rows_: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgh,bksh->bkgs", q, rows_)).max()

    assert error(rows(case, stored)) < TOLERANCE
    assert error(np.roll(rows(case, stored), 1, axis=2)) > 0.1, "the scores of the tokens before would pass"
    assert error(rows(case, shifted(case, stored))) > 10 * TOLERANCE, "a shifted scale would pass"


def check_values(case: Case, how: Launch) -> None:
    p, stored = weights(), arrays(case)
    found = weighted_values(case.side, p, stored, how)

    def error(rows_: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgs,bksh->bkgh", p, rows_)).max()

    assert error(rows(case, stored)) < TOLERANCE
    assert error(np.roll(rows(case, stored), 1, axis=2)) > 10 * TOLERANCE, "the values of the tokens before would pass"
    assert error(rows(case, shifted(case, stored))) > 10 * TOLERANCE, "a shifted scale would pass"


@each
def test_scores_equal_the_reference_on_the_same_codes(case):
    check_scores(case, INTERPRETED)


@each
def test_weighted_values_equal_the_reference_on_the_same_codes(case):
    check_values(case, INTERPRETED)


def test_tables_of_other_sizes_are_refused():
    case = codebook(2, 64, "tokens")
    words, _, *statistics = arrays(case)
    with pytest.raises(ValueError, match=r"the table has 4 entries"):
        scores(case.side, query(case), [words, np.zeros(8, np.float32), *statistics], INTERPRETED)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_table_lowers_for_cuda(case, arithmetic):
    stored = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays(case)]
    text = lower_for_cuda(lambda *a: scores(case.side, a[0], list(a[1:]), Launch(arithmetic)), query(case), *stored)
    assert "matvec_scores" in text
    text = lower_for_cuda(lambda *a: weighted_values(case.side, a[0], list(a[1:]), Launch(arithmetic)), weights(), *stored)
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
@pytest.mark.parametrize("positions", [(0, 1), (14, 15), (3, 8, 15), (4, 5, 6, 7), (12, 13, 14, 15)])
def test_codes_become_entries_and_numbers(positions):
    """For every word, beside some other one in its register: bit for bit."""
    everything = np.arange(65536, dtype=np.uint32)
    pairs = np.stack([everything, everything[::-1] * 40503 % 65536], axis=-1).astype(np.uint16).view(np.int16).reshape(4096, 32)
    tiles, bits = [[jnp.asarray(pairs)]], [Bit(0, 0, p) for p in positions]
    in_pairs = [paired(tiles, axis, jnp.asarray(64)) for axis in (0, 1)]
    code = sum((pairs.view(np.uint16) >> p & 1) << i for i, p in enumerate(positions))
    entries = np.random.default_rng(0).standard_normal(1 << len(bits)).astype(np.float16)

    wanted, neighbour = (entries[c].view(np.uint16) for c in (code, code ^ 1))
    assert (neighbour != wanted).mean() > 0.9
    for words in in_pairs:
        found = table_lookup.chosen(words, bits, [table_lookup.in_both_halves(entry) for entry in jnp.asarray(entries)])
        np.testing.assert_array_equal(np.asarray(joined(found)).view(np.uint16), wanted, err_msg=f"{words.axis=}")

    for words in (SingleWords(tiles), *in_pairs):
        found, bias = words.number(bits)
        np.testing.assert_array_equal(np.asarray(joined(found), np.float32) - bias, code)


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize(("bits", "channels"), [(2, 128), (2, 64), (3, 128), (3, 64), (4, 128), (4, 256)])
def test_tables_are_looked_up_exactly_in_assembly(bits, channels):
    """Random words, bit for bit: every slot and chunk."""
    layout, rng = planes(bits, channels), np.random.default_rng(bits)
    tokens = 32
    codes = rng.integers(0, 1 << bits, (tokens, channels))
    stored = [np.asarray(w) for w in pack(jnp.asarray(codes, jnp.uint8), plane_layout(bits, channels, 32))]
    tiles = [[jnp.asarray(w[:, layout.width * j : layout.width * (j + 1)]) for j in range(w.shape[1] // layout.width)] for w in stored]
    entries = rng.standard_normal(1 << bits).astype(np.float16)
    words = [word.reshape(1, 1) for word in table_lookup.byte_planes(jnp.asarray(entries))]
    looked = table_lookup.Looked.up(SingleWords(tiles), layout, table_lookup.Table([], words))
    run = tokens // layout.slots
    for slot in range(layout.slots):
        for chunk in range(layout.chunks):
            found = np.asarray(looked.plane(slot, chunk)).view(np.uint16)
            wanted = entries[codes[run * slot : run * (slot + 1), layout.width * chunk : layout.width * (chunk + 1)]].view(np.uint16)
            np.testing.assert_array_equal(found, wanted, err_msg=f"{slot=} {chunk=}")
            assert (found != np.roll(wanted, 1, axis=1)).any()
