"""Attention over codes with tables, outliers and keys before RoPE, interpreted, against float64 attention over the rows that they stand
for; their lowering for CUDA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.attention.kernel_sides import nonuniform
from kvq_jax.groups import ChannelGroup
from kvq_jax.packing import plane_layout
from pallas_kernels import matvec
from pallas_kernels._launch import Launch
from pallas_kernels.decode import Tuning, decode_attention
from pallas_kernels.outliers import outlier_scores
from tests.pallas_kernels.kernel_cases import row_errors
from tests.pallas_kernels.lowering import lower_for_cuda
from tests.pallas_kernels.nonuniform_cases import Format, Stored, spoiled, stored, structs
from tests.pallas_kernels.test_decode import output, reference

TILE, CAPACITY, HEADS = 64, 160, 2  # the capacity is no multiple of the tile
LIMITS = (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, CAPACITY)
TUNING = Tuning(tile=TILE, cores=2 * HEADS * len(LIMITS), resident=1)
TOLERANCE = 5e-3
INTERPRETED = Launch(interpret=True)


@dataclasses.dataclass(frozen=True)
class Case:
    id: str
    head_dim: int
    group: int
    k: Format
    v: Format

    @functools.cached_property
    def sides(self) -> tuple[Stored, Stored]:
        k, v = (stored(f, self.head_dim, len(LIMITS), HEADS, CAPACITY, i) for i, f in enumerate((self.k, self.v)))
        return k, v

    @functools.cached_property
    def q(self) -> jax.Array:
        shape = (len(LIMITS), HEADS, self.group, self.head_dim)
        return jnp.asarray(np.random.default_rng(9).standard_normal(shape) * 0.5, jnp.float32)


CASES = (
    Case("nuq3_1percent_before_rope", 128, 1, Format(3, "channels", 4, pre_rope=True), Format(3, "token", 4)),
    Case("nuq4_after_rope", 64, 7, Format(4, "channels", 2), Format(4, 32)),
    Case("nuq2_groups_before_rope", 128, 8, Format(2, 64, pre_rope=True), Format(2, "channels", 3)),
    Case("nuq4_h256", 256, 4, Format(4, "channels", pre_rope=True), Format(3, "token", 6)),
    Case("nuq2_h64_slots", 64, 4, Format(2, "channels", 9, pre_rope=True), Format(2, "token", 9)),
)
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@functools.partial(jax.jit, static_argnames=("case", "how"))
def attend(case: Case, q, k, v, limits, how):
    sides = case.sides
    return decode_attention(q, (sides[0].side, k), (sides[1].side, v), limits, capacity=CAPACITY, tuning=TUNING, how=how)


def check_attention(case: Case, how: Launch) -> None:
    k, v = case.sides
    found = output(attend(case, case.q, k.arrays, v.arrays, jnp.asarray(LIMITS), how))
    wanted = reference(case.q, k.rows(), v.rows(), LIMITS)
    errors = row_errors(found, wanted).max(axis=(1, 2))
    assert (found[0] == 0).all(), "a row without tokens has no output"
    assert errors[1:].max() < TOLERANCE, f"errors by row {dict(zip(LIMITS, errors, strict=True))}"
    wrong = {
        "zeros": np.zeros(found.shape),
        "values in the place of keys": reference(case.q, v.rows(), v.rows(), LIMITS),
        "one token fewer": reference(case.q, k.rows(), v.rows(), tuple(max(n - 1, 0) for n in LIMITS)),
        "one token more": reference(case.q, k.rows(), v.rows(), tuple(min(n + 1, CAPACITY - 1) for n in LIMITS)),
        "keys of the next head": reference(case.q, np.roll(k.rows(), 1, axis=1), v.rows(), LIMITS),
    }
    if case.k.slots:
        wrong["keys without outliers"] = reference(case.q, k.rows(outliers=False), v.rows(), LIMITS)
    if case.v.slots:
        wrong["values without outliers"] = reference(case.q, k.rows(), v.rows(outliers=False), LIMITS)
    if case.k.pre_rope:
        wrong["keys without a rotation"] = reference(case.q, k.rows(rotated=False), v.rows(), LIMITS)
        wrong["keys one position further"] = reference(case.q, k.rows(moved=1), v.rows(), LIMITS)
    for name, rows in wrong.items():
        assert row_errors(found, rows)[1:].max() > 5 * TOLERANCE, f"{name} would pass"


@each
def test_every_length_equals_the_reference_on_the_same_codes(case):
    check_attention(case, INTERPRETED)


@each
def test_garbage_in_unused_capacity_does_not_leak(case):
    clean, dirty = (
        output(attend(case, case.q, *arrays, jnp.asarray(LIMITS), INTERPRETED))
        for arrays in ([side.arrays for side in case.sides], [spoiled(side, LIMITS) for side in case.sides])
    )
    np.testing.assert_array_equal(dirty, clean)


def check_products(case: Case, how: Launch) -> None:
    """q K^T and p V by themselves, over all tokens."""
    k, v = case.sides
    capacity, tuning = 128, Tuning(tile=64, cores=2 * HEADS, resident=1)
    sides = [stored(s.format, case.head_dim, 1, HEADS, capacity, i) for i, s in enumerate((k, v))]
    q, p = case.q[:1], jnp.asarray(np.random.default_rng(3).random((1, HEADS, case.group, capacity)), jnp.float32)
    found = jax.jit(lambda q, a: matvec.scores(q, sides[0].side, a, capacity=capacity, tuning=tuning, how=how))(q, sides[0].arrays)
    summed = jax.jit(lambda p, a: matvec.weighted_values(p, sides[1].side, a, tuning=tuning, how=how))(p, sides[1].arrays)
    for outliers in (True, False):
        of_scores = row_errors(found, np.einsum("bkgh,bksh->bkgs", q, sides[0].rows(outliers=outliers))).max()
        of_values = row_errors(summed, np.einsum("bkgs,bksh->bkgh", p, sides[1].rows(outliers=outliers))).max()
        for error, format in ((of_scores, case.k), (of_values, case.v)):
            assert (error < TOLERANCE) if outliers or not format.slots else (error > 5 * TOLERANCE), f"{outliers=}: {error}"


@each
def test_the_products_by_themselves_equal_the_reference(case):
    check_products(case, INTERPRETED)


def test_outliers_of_padding_are_not_read():
    q = jnp.ones((2, 2, 1, 64), jnp.float32)
    index, residual = np.zeros((2, 1, 256), np.uint16), np.ones((2, 1, 256), np.float32)
    found = np.asarray(outlier_scores(q, jnp.asarray(index), jnp.asarray(residual), jnp.asarray([0, 129]), None, INTERPRETED))
    assert (found[0] == 0).all()
    assert (found[1, 0, 0] == 1).all(), "all tokens of a program that reads any"
    assert (found[1, 1] == 0).all(), "no slot belongs to the other head"


def test_what_the_kernels_cannot_read_has_a_reason():
    layout = plane_layout(4, 128, 32)
    assert "5-bit codes" in str(nonuniform(plane_layout(5, 128, 32), None))
    assert "groups of 16 channels" in str(nonuniform(layout, ChannelGroup(1, 16)))
    assert "head_dim 80" in str(nonuniform(plane_layout(4, 80, 32), None))
    assert "no multiple of 32" in str(nonuniform(plane_layout(4, 128, 16), None))


def structs_of(case: Case):
    q, limits = jax.ShapeDtypeStruct(case.q.shape, jnp.float32), jax.ShapeDtypeStruct((len(LIMITS),), jnp.int32)
    return q, *(structs(side.arrays) for side in case.sides), limits


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_kernel_lowers_for_cuda(case, arithmetic):
    text = lower_for_cuda(lambda *args: attend(case, *args, Launch(arithmetic)), *structs_of(case))
    assert "decode_attention" in text
    assert ("outlier_scores" in text) == bool(case.k.slots)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_kernel_runs_on_a_gpu(case, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_attention(case, Launch(arithmetic))
    check_products(case, Launch(arithmetic))
