"""GEAR against what its public code's functions return for the same numbers (a slice in
tests/golden/), and what ours does otherwise."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import grouped_array, low_rank, sparse_outliers
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.arrays.sparse_outliers import Pool
from kvq_jax.methods.gear.codec import GearCodec, start_matrix
from tests.kvq_jax.methods.test_golden import compare_numbers, golden
from tests.kvq_jax.origins import PROMPT

TOKENS, CHANNELS = 128, 64
# heads of the file's inputs: outliers of values are chosen over all of them, and the file has the
# results of the first
HEADS = {"k": 1, "v": 4}
# outliers on each side: 2 % of the KV width of 256, halved, for keys and values alike
OF_PUBLIC_CODE = 2

find_factors = jax.jit(low_rank.factors, static_argnums=2)


def product(error: np.ndarray, start: np.ndarray, turns: int = 3) -> np.ndarray:
    left, right = find_factors(jnp.asarray(error), jnp.asarray(start), turns)
    return np.asarray(left) @ np.swapaxes(np.asarray(right), -1, -2)


def codec(side: str, bits: int, outliers: bool) -> GearCodec:
    """The codec of the golden file: one block of all tokens, groups of 64."""
    axis = "tokens" if side == "k" else "channels"
    slots = 2 * OF_PUBLIC_CODE * (HEADS[side] * CHANNELS if side == "k" else TOKENS)
    pool = Pool(TOKENS, slots, overflows=False) if outliers else None
    format = GroupFormat(bits, "asym", axis, 64, CHANNELS, TOKENS, "float32")
    return GearCodec(side, format, 2, 3, OF_PUBLIC_CODE, pool)


def grouped(x: Any, format: GroupFormat) -> np.ndarray:
    """Return rows as groups alone would read them."""
    return np.asarray(grouped_array.dequantize(grouped_array.quantize(jnp.asarray(x), format)))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side", ["k", "v"])
def test_codes_and_low_rank_products_are_those_of_the_public_code(side: str, bits: int):
    data = golden("gear")
    x = data[side.upper()][:, :1]
    dense = grouped(x, codec(side, bits, outliers=False).format)
    if bits == 2:
        compare_numbers(dense, data[f"{side}_kivi_deq_b2"])
    start, wanted = data[f"p0_b{bits}_r2"], data[f"{side}_lowrank_b{bits}_r2"]
    np.testing.assert_allclose(product(x - dense, start), wanted, atol=1e-5)
    assert np.abs(product(x - dense, start, turns=1) - wanted).max() > 1e-2, (
        "one iteration would pass"
    )


@pytest.mark.parametrize("side", ["k", "v"])
def test_outliers_are_those_of_the_public_code(side: str):
    """Rows without outliers, then with the low-rank product of what is left. Ours are nearer at the
    outliers themselves."""
    data, own = golden("gear"), codec(side, 4, outliers=True)
    x = data[side.upper()]
    mask = np.asarray(own._outliers(jnp.asarray(x)))
    count = mask.sum(2) if side == "k" else mask.sum((1, 3))
    assert (count == 2 * OF_PUBLIC_CODE).all()
    theirs, first = data[f"{side}out_gear_deq_b4_r2"], (slice(None), slice(1))
    means = own._means(jnp.asarray(x))
    without = np.where(mask, x, grouped(jnp.where(mask, means, x), own.format))
    wanted = data[f"{side}_outlier_deq_b4"]  # in float16
    np.testing.assert_allclose(without[first], wanted, rtol=2e-3, atol=2e-3)
    plain = np.where(mask, x, grouped(x, own.format))
    assert np.abs(plain[first] - wanted).max() > 0.1, "ranges with the outliers would pass"
    found = product(x[first] - wanted.astype(np.float32), data["p0_b4_r2"])
    np.testing.assert_allclose(found, data[f"{side}out_lowrank_b4_r2"], atol=1e-5)

    body = own.quantize((), (), jnp.asarray(x), PROMPT)
    back = np.asarray(own.dequantize((), (), body))
    np.testing.assert_allclose(back[mask], x[mask], rtol=1e-3, atol=1e-3)
    ours, public = (rows - x[first] for rows in (back[first], theirs))
    assert np.linalg.norm(ours[mask[first]]) < 0.2 * np.linalg.norm(public[mask[first]])
    assert np.linalg.norm(ours) < 1.02 * np.linalg.norm(public)


def test_an_error_of_low_rank_is_found_and_one_without_any_costs_nothing():
    rng = np.random.default_rng(0)
    exact = (rng.normal(size=(2, 32, 2)) @ rng.normal(size=(2, 2, 16))).astype(np.float32)
    np.testing.assert_allclose(product(exact, start_matrix(16, 2)), exact, atol=1e-4)
    assert np.abs(product(exact, start_matrix(16, 1)) - exact).max() > 0.1, "rank 1 would do"
    np.testing.assert_allclose(product(exact, start_matrix(16, 5)), exact, atol=1e-4)
    np.testing.assert_array_equal(product(0 * exact, start_matrix(16, 3)), 0 * exact)
    left, _ = find_factors(
        jnp.asarray(rng.normal(size=(1, 32, 16)), jnp.float32), jnp.asarray(start_matrix(16, 4)), 2
    )
    np.testing.assert_allclose(np.asarray(left)[0].T @ np.asarray(left)[0], np.eye(4), atol=1e-5)


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Keys with a few large entries, and with an error that has a pattern; values likewise."""
    rng = np.random.default_rng(3)
    k, v = (rng.normal(size=(1, 2, 64, 32)).astype(np.float32) for _ in range(2))
    for x in (k, v):
        x[0, :, ::9, ::7] *= 12
    return k, v


def test_without_a_product_and_outliers_it_is_kivi():
    k, v = map(jnp.asarray, rows())
    for one, other in zip(
        kvq.roundtrip("gear:outliers=0,rank=0,group_size=32", k, v, layout="BNTH"),
        kvq.roundtrip("kivi", k, v, layout="BNTH"),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_outliers_of_many_heads_have_shorter_runs_that_16_bits_can_count():
    """All heads of a run share its slots, and their ends are 16-bit numbers."""
    spec, heads = "gear:outliers=0.45,rank=0", 32
    (plan,) = kvq.cache.layout(spec, kvq.CacheDims(1, heads, heads, 128, 4096), 1, 256).plans
    assert isinstance(plan.k, GearCodec)
    assert plan.k.pool == Pool(32, 2 * 7 * heads * 128, overflows=False)
    rows = np.random.default_rng(0).normal(size=(1, heads, 64, 128)).astype(np.float32)
    for read in kvq.roundtrip(spec, jnp.asarray(rows), jnp.asarray(rows), layout="BNTH"):
        assert np.sqrt(np.mean((np.asarray(read) - rows) ** 2)) < 0.15


def test_a_fraction_of_the_tokens_and_not_of_the_width_are_outliers():
    spec, dims = "gear:outliers=0.1", kvq.CacheDims(1, 8, 8, 128, 1024)
    (plan,) = kvq.cache.layout(spec, dims, 1, 256).plans
    assert isinstance(plan.k, GearCodec)
    assert plan.k.per_side == 3, "of 64 tokens"
    assert plan.v.facts.outlier_slots(8) == 2 * 51, "of 1024 entries of a token"
    assert kvq.size.outlier_fraction(spec, dims) == pytest.approx(0.0967, abs=1e-3)
    rows = np.random.default_rng(0).normal(size=(1, 8, 64, 128)).astype(np.float32)
    body = plan.k.quantize((), (), jnp.asarray(rows), PROMPT)
    kept, dropped = sparse_outliers.counts(body.outliers)
    assert (int(kept[0, 0]), int(dropped[0, 0])) == (2 * 3 * 8 * 128, 0)
