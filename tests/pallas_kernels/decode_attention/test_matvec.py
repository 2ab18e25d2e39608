"""The stand-alone matrix-vector products, interpreted, against plain sums over the rows of the same
codes; and their lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from tests.pallas_kernels.kernel_cases import (
    KernelCase,
    kernel_cases,
    reader_of,
    row_errors,
    stored_rows,
    stored_structs,
)
from tests.pallas_kernels.lowering import lower_for_cuda

BATCH, HEADS = 1, 2
CAPACITY, LONG = (
    256,
    1024,
)  # tokens, interpreted and on a GPU: with the usual steps, at least four splits
TUNING = Tuning(tile=64, cores=2 * BATCH * HEADS, resident=1)  # two splits of two tiles
INTERPRETED = Launch(interpret=True)
TOLERANCE = 3e-3
INTERPRETED_CASES = (
    "innerq1_sym_h128_g4",
    "innerq2_asym_h64_g7",
    "innerq2_hybrid_h128_g1",
    "innerq3_sym_h256_g8",
    "kivi2_h64_g8_size64",
    "kivi3_h64_g1_size32",
    "kivi8_h64_g16_size32",
    "dense",
)


def inputs(case: KernelCase, capacity: int):
    rng = np.random.default_rng(5)
    k, v = (
        stored_rows(f, rng.standard_normal((BATCH, HEADS, capacity, case.head_dim)))
        for f in (case.k, case.v)
    )
    q = rng.standard_normal((BATCH, HEADS, case.group, case.head_dim))
    p = rng.random((BATCH, HEADS, case.group, capacity))
    return jnp.asarray(q, jnp.float32), jnp.asarray(p, jnp.float32), k, v


# A tuning of None is the usual one.


@functools.partial(jax.jit, static_argnames=("case", "capacity", "tuning", "launch"))
def scores(case, q, k, capacity, tuning, launch):
    return matvec.scores(
        q,
        reader_of(case.k, case.head_dim),
        k,
        capacity=capacity,
        launch=launch,
        **({"tuning": tuning} if tuning else {}),
    )


@functools.partial(jax.jit, static_argnames=("case", "tuning", "launch"))
def weighted_values(case, p, v, tuning, launch):
    return matvec.weighted_values(
        p,
        reader_of(case.v, case.head_dim),
        v,
        launch=launch,
        **({"tuning": tuning} if tuning else {}),
    )


def check_scores(case: KernelCase, capacity: int, tuning: Tuning | None, launch: Launch) -> None:
    q, _, (k, k_rows), (_, v_rows) = inputs(case, capacity)
    found = scores(case, q, k, capacity, tuning, launch)
    assert found.shape == (BATCH, HEADS, case.group, capacity)

    def error(rows: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgh,bksh->bkgs", q, rows)).max()

    assert error(k_rows) < TOLERANCE
    assert np.abs(found).max() > 1, "zeros would pass"
    assert error(v_rows) > 0.1, "values in the place of keys would pass"
    assert error(np.roll(k_rows, 1, axis=2)) > 0.1, "the scores of the tokens before would pass"


def check_values(case: KernelCase, capacity: int, tuning: Tuning | None, launch: Launch) -> None:
    _, p, (_, k_rows), (v, v_rows) = inputs(case, capacity)
    found = weighted_values(case, p, v, tuning, launch)
    assert found.shape == (BATCH, HEADS, case.group, case.head_dim)

    def error(rows: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgs,bksh->bkgh", p, rows)).max()

    assert error(v_rows) < TOLERANCE
    assert np.abs(found).max() > 1, "zeros would pass"
    assert error(k_rows) > 0.1, "keys in the place of values would pass"
    assert error(np.roll(v_rows, 1, axis=2)) > 0.02, "weights of the tokens before would pass"


@kernel_cases(*INTERPRETED_CASES)
def test_scores_equal_the_reference_on_the_same_codes(case):
    check_scores(case, CAPACITY, TUNING, INTERPRETED)


@kernel_cases(*INTERPRETED_CASES)
def test_weighted_values_equal_the_reference_on_the_same_codes(case):
    check_values(case, CAPACITY, TUNING, INTERPRETED)


@kernel_cases("innerq2_sym_h64_g4", "kivi4_h128_g7_size32")
def test_a_scale_shifted_by_one_group_is_noticed(case):
    """Negative control of the two tests above."""
    q, p, (k, k_rows), (v, v_rows) = inputs(case, CAPACITY)
    shifted = [[*arrays[:1], *(jnp.roll(a, 1, axis=2) for a in arrays[1:])] for arrays in (k, v)]
    found = (
        scores(case, q, shifted[0], CAPACITY, TUNING, INTERPRETED),
        weighted_values(case, p, shifted[1], TUNING, INTERPRETED),
    )
    wanted = np.einsum("bkgh,bksh->bkgs", q, k_rows), np.einsum("bkgs,bksh->bkgh", p, v_rows)
    for name, a, b in zip(("scores", "values"), found, wanted, strict=True):
        assert row_errors(a, b).max() > 5 * TOLERANCE, name


def test_a_capacity_of_no_whole_tiles_is_refused():
    case = KernelCase("dense", None, None, 64)
    with pytest.raises(ValueError, match="capacity=96 is not whole tiles of 64"):
        matvec.weighted_values(
            jnp.zeros((1, 1, 1, 96)),
            reader_of(None, 64),
            [jnp.zeros((1, 1, 96, case.head_dim), jnp.uint16)],
            tuning=TUNING,
        )


def test_a_tile_shorter_than_a_span_is_refused():
    with pytest.raises(ValueError, match="not whole spans of 32"):
        matvec.scores(
            jnp.zeros((1, 1, 1, 64)), reader_of(None, 64), [], capacity=256, tuning=Tuning(tile=16)
        )


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases()
def test_both_products_lower_for_cuda(case, arithmetic):
    q = jax.ShapeDtypeStruct((BATCH, HEADS, case.group, case.head_dim), jnp.float32)
    p = jax.ShapeDtypeStruct((BATCH, HEADS, case.group, LONG), jnp.float16)
    k, v = (stored_structs(f, BATCH, HEADS, LONG, case.head_dim) for f in (case.k, case.v))
    launch = Launch(arithmetic)
    text = lower_for_cuda(
        lambda *a: (
            scores(case, a[0], a[1], LONG, None, launch),
            weighted_values(case, a[2], a[3], None, launch),
        ),
        q,
        k,
        p,
        v,
    )
    assert "matvec_scores" in text
    assert "matvec_values" in text


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases()
def test_both_products_run_on_a_gpu(case, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_scores(case, LONG, None, Launch(arithmetic))
    check_values(case, LONG, None, Launch(arithmetic))
