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

from kvq_jax.packing import pack, plane_layout, unpack
from pallas_kernels import lookup, matvec, table
from pallas_kernels._launch import Launch
from pallas_kernels.codebook import Codebook
from pallas_kernels.decode import Tuning, decode_attention
from pallas_kernels.lookup import Bit, Words
from pallas_kernels.planes import Planes
from pallas_kernels.polar import Polar, quadrant_cos_sin
from pallas_kernels.sides import Side
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
    side: Codebook | Polar
    shared: bool = False

    @property
    def head_dim(self) -> int:
        count, width = self.side.chunks
        return count * width


def codebook(bits: int, head_dim: int, affine: Any, group: int | None = None, shared: bool = False, dtype: str = "float16") -> Case:
    name = f"codebook{bits}_h{head_dim}_{affine}_{group}{'_shared' if shared else ''}"
    return Case(name, Codebook(planes(bits, head_dim), affine, group or head_dim, dtype), shared)


def polar(angle: int, radius: int, head_dim: int, angles: Any, formula: Any, group: int = 64) -> Case:
    side = Polar(planes(angle + radius, head_dim // 2), angle, group, angles, formula)
    return Case(f"polar{angle}{radius}_{angles}_{formula}_h{head_dim}", side)


CASES = (
    codebook(2, 64, "tokens", shared=True),
    codebook(2, 128, "channels"),
    codebook(3, 64, "tokens", 32, dtype="bfloat16"),
    codebook(3, 128, "channels"),
    codebook(4, 64, "tokens", 64, shared=True, dtype="float32"),
    codebook(4, 128, "tokens", 32, shared=True),
    codebook(4, 256, "channels"),
    polar(4, 4, 128, "grid", "table", 128),
    polar(4, 2, 128, "grid", "table"),
    polar(3, 2, 128, "grid", "table"),
    polar(3, 4, 128, "grid", "trigonometry"),
    polar(4, 3, 128, "grouped", "trigonometry", 128),
    polar(4, 4, 64, "grouped", "table", 32),
)
VALUES = tuple(case for case in CASES if isinstance(case.side, Codebook))


def each(cases: tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def arrays(case: Case, seed: int = 0) -> list[np.ndarray]:
    """What a cache would store: words, then the side's other arrays; 16-bit floats of statistics as their bits."""
    rng, side = np.random.default_rng(seed), case.side
    codes = rng.integers(0, 1 << side.planes.bits, (BATCH, HEADS, CAPACITY, side.planes.channels))
    words = [np.asarray(w) for w in pack(jnp.asarray(codes, jnp.uint8), plane_layout(side.planes.bits, side.planes.channels, 32))]
    if isinstance(side, Codebook):
        found = [rng.standard_normal(1 << side.planes.bits).astype(np.float32)]
        ranges = [(0.5, 1.5), (-1.0, 1.0)]
        if side.affine == "channels":
            return [*words, *found, *(rng.uniform(*r, (HEADS, case.head_dim)).astype(np.float32) for r in ranges)]
        statistics_shape = (BATCH, 1 if case.shared else HEADS, case.head_dim // side.group, CAPACITY)
    else:
        found, step = [], 2 * np.pi / (1 << side.angle_bits)
        ranges = [(0.2, 1.0), (0.0, 1.0), (0.4 * step, step), (-1.0, 1.0)][: 2 if side.angles == "grid" else 4]
        statistics_shape = (BATCH, HEADS, CAPACITY // side.group, side.planes.channels)
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
    if isinstance(side, Codebook):
        table, *statistics = floats
        if side.affine == "channels":
            scale, zero = (s[:, None] for s in statistics)
        else:
            scale, zero = (np.repeat(np.swapaxes(s, 2, 3), side.group, axis=3) for s in statistics)
        return np.asarray(table, np.float64)[codes] * scale + zero
    scale, zero, *angle = (np.repeat(s, side.group, axis=2) for s in floats)
    turn, count = codes % (1 << side.angle_bits) + 0.5, 1 << side.angle_bits
    theta = turn * angle[0] + angle[1] if angle else turn * 2 * np.pi / count
    radius = (codes // count + 0.5) * scale + zero
    return np.concatenate([radius * np.cos(theta), radius * np.sin(theta)], axis=-1)


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
    """The first statistic shifted by one channel, token or group of tokens."""
    found, sets = list(stored), len(case.side.planes.sets)
    at, axis = (sets, 2) if isinstance(case.side, Polar) else (sets + 1, -1)
    found[at] = np.roll(stored[at], 1, axis=axis)
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


@each(CASES)
def test_scores_equal_the_reference_on_the_same_codes(case):
    check_scores(case, INTERPRETED)


@each(VALUES)
def test_weighted_values_equal_the_reference_on_the_same_codes(case):
    check_values(case, INTERPRETED)


def test_both_kinds_of_tables_serve_attention_and_ignore_unused_capacity():
    keys, values = polar(4, 4, 64, "grouped", "table", 32), codebook(2, 64, "tokens")
    k, v, q, limit = arrays(keys, 1), arrays(values, 2), query(keys), 150
    spoiled = [[a.copy() for a in side] for side in (k, v)]
    for a in spoiled[0]:
        a[:, :, -(CAPACITY - 192) * a.shape[2] // CAPACITY :] = 0x7FFF  # words, and fp16 nan
    spoiled[1][0][:, :, limit + 10 :] = -1
    for a in spoiled[1][2:]:
        a[..., limit:] = 0x7FFF

    @jax.jit
    def attend(k, v):
        return decode_attention(
            q, (keys.side, k), (values.side, v), jnp.asarray([limit]), capacity=CAPACITY, tuning=TUNING, how=INTERPRETED
        )

    k_rows, v_rows = (rows(case, stored)[:, :, :limit] for case, stored in ((keys, k), (values, v)))
    s = np.einsum("bkgh,bksh->bkgs", q, k_rows) * keys.head_dim**-0.5
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    wanted = np.einsum("bkgs,bksh->bkgh", e / e.sum(axis=-1, keepdims=True), v_rows)
    for name, stored in {"clean": (k, v), "spoiled": spoiled}.items():
        part = attend(*stored)
        assert row_errors(part.o / part.l, wanted).max() < 5 * TOLERANCE, name
    assert row_errors(part.o / part.l, np.roll(wanted, 1, axis=1)).max() > 0.1


@pytest.mark.parametrize(
    ("angles", "arithmetic", "calculates"), [("grouped", "asm", True), ("grouped", "jnp", False), ("grid", "asm", False)]
)
def test_angles_of_groups_are_calculated_where_that_takes_fewer_instructions(angles, arithmetic, calculates):
    case = polar(4, 4, 128, angles, "faster", 128)
    stored = arrays(case)

    def lowered(side: Side) -> str:
        return lower_for_cuda(lambda *a: scores(side, a[0], list(a[1:]), Launch(arithmetic)), query(case), *stored)

    same = dataclasses.replace(case.side, formula="trigonometry" if calculates else "table")
    other = dataclasses.replace(case.side, formula="table" if calculates else "trigonometry")
    assert lowered(case.side) == lowered(same)
    assert lowered(case.side) != lowered(other)


def test_values_in_polar_form_and_tables_of_other_sizes_are_refused():
    case = polar(4, 4, 128, "grid", "table", 128)
    with pytest.raises(NotImplementedError, match="polar codes hold keys"):
        weighted_values(case.side, weights(), arrays(case), INTERPRETED)
    case = codebook(2, 64, "tokens")
    words, _, *statistics = arrays(case)
    with pytest.raises(ValueError, match=r"the table has 4 entries"):
        scores(case.side, query(case), [words, np.zeros(8, np.float32), *statistics], INTERPRETED)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each(CASES)
def test_every_table_lowers_for_cuda(case, arithmetic):
    stored = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays(case)]
    text = lower_for_cuda(lambda *a: scores(case.side, a[0], list(a[1:]), Launch(arithmetic)), query(case), *stored)
    assert "matvec_scores" in text
    if case in VALUES:
        text = lower_for_cuda(lambda *a: weighted_values(case.side, a[0], list(a[1:]), Launch(arithmetic)), weights(), *stored)
        assert "matvec_values" in text


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each(CASES)
def test_every_table_runs_on_a_gpu(case, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_scores(case, Launch(arithmetic))
    if case in VALUES:
        check_values(case, Launch(arithmetic))


# ---- the assembly, in NumPy (emulator.py) ----


def both(function: Any) -> tuple[Any, Any]:
    return tuple(np.asarray(jnp.asarray(function(asm)).view(jnp.uint16)) for asm in (True, False))


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize("positions", [(0, 1), (14, 15), (3, 8, 15), (4, 5, 6, 7), (12, 13, 14, 15)])
def test_assembly_computes_what_array_operations_compute(positions):
    """For every word, beside some other one in its register: bit for bit."""
    everything = np.arange(65536, dtype=np.uint32)
    pairs = np.stack([everything, everything[::-1] * 40503 % 65536], axis=-1).astype(np.uint16).view(np.int16).reshape(4096, 32)
    words, bits = Words([[jnp.asarray(pairs)]]), [Bit(0, 0, p) for p in positions]
    code = sum((pairs.view(np.uint16) >> p & 1) << i for i, p in enumerate(positions))
    entries = np.random.default_rng(0).standard_normal((1 << len(bits), 1, 32)).astype(np.float16)

    asm, plain = both(lambda asm: lookup.chosen(words, bits, list(jnp.asarray(entries)), asm))
    wanted = np.take_along_axis(entries[:, 0], code, axis=0).view(np.uint16)
    np.testing.assert_array_equal(plain, wanted)
    np.testing.assert_array_equal(asm, wanted)
    assert (np.take_along_axis(entries[:, 0], code ^ 1, axis=0).view(np.uint16) != wanted).mean() > 0.9

    for asm in (True, False):
        found, bias = lookup.number(words, bits, asm)
        np.testing.assert_array_equal(np.asarray(found, np.float32) - bias, code)

    x = jnp.asarray(np.broadcast_to(entries[0], pairs.shape))
    asm, plain = both(lambda asm: lookup.negated(x, words, bits[:2], asm))
    np.testing.assert_array_equal(asm, plain)
    np.testing.assert_array_equal(plain.view(np.float16), np.where((code ^ code >> 1) & 1, -x, x))

    for asm in (True, False):
        cos, sin = quadrant_cos_sin(words, bits, asm)
        theta = (code + 0.5) * 2 * np.pi / (1 << len(bits))
        np.testing.assert_allclose(np.asarray(cos, np.float64), np.cos(theta), atol=5e-4)
        np.testing.assert_allclose(np.asarray(sin, np.float64), np.sin(theta), atol=5e-4)


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
    words = [word.reshape(1, 1) for word in table.byte_planes(jnp.asarray(entries))]
    looked = table.Looked.up(Words(tiles), layout, table.Table([], words), True)
    run = tokens // layout.slots
    for slot in range(layout.slots):
        for chunk in range(layout.chunks):
            found = np.asarray(looked.plane(slot, chunk)).view(np.uint16)
            wanted = entries[codes[run * slot : run * (slot + 1), layout.width * chunk : layout.width * (chunk + 1)]].view(np.uint16)
            np.testing.assert_array_equal(found, wanted, err_msg=f"{slot=} {chunk=}")
            assert (found != np.roll(wanted, 1, axis=1)).any()
