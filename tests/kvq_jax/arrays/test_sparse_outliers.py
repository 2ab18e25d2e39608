"""The fixed-shape store of exact entries: what it keeps, what it drops and counts, and which fractions it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import sparse_outliers
from kvq_jax.arrays.sparse_outliers import UNUSED, slots_per_side
from kvq_jax.cache.cache import CacheDims
from tests.kvq_jax.cache_runs import filled
from tests.kvq_jax.layer_runs import parameters_of, sequences

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 5, 8


def drawn(share: float) -> tuple[np.ndarray, np.ndarray]:
    """(residuals, which of them are outliers)."""
    rng = np.random.default_rng(0)
    residual = rng.normal(size=(BATCH, HEADS, TOKENS, HEAD_DIM)).astype(np.float32)
    return residual, rng.uniform(size=residual.shape) < share


@pytest.mark.parametrize(("share", "slots"), [(0.1, 24), (0.0, 4), (0.5, 4), (1.0, 1)])
def test_the_largest_residuals_are_added_back_and_the_others_are_counted(share: float, slots: int):
    residual, mask = drawn(share)
    found = sparse_outliers.collect(jnp.asarray(residual), jnp.asarray(mask), slots, "float32", True)
    restored = np.asarray(sparse_outliers.add(jnp.zeros(residual.shape), found))
    for b in range(BATCH):
        for t in range(TOKENS):
            marked = np.where(mask[b, :, t], residual[b, :, t], 0).ravel()
            kept = np.argsort(-np.abs(marked), kind="stable")[:slots]
            expected = np.zeros_like(marked)
            expected[kept] = marked[kept]
            np.testing.assert_array_equal(restored[b, :, t].ravel(), expected, err_msg=f"{b=} {t=}")
            assert found.dropped is not None
            assert int(found.dropped[b, t]) == max(mask[b, :, t].sum() - slots, 0)
    index = np.asarray(found.index).astype(int)
    assert (np.diff(index, axis=1) >= 0).all(), "slots of a token are sorted"
    assert (np.asarray(found.residual)[index == UNUSED] == 0).all()


def test_residuals_beyond_the_stored_dtype_saturate():
    residual = np.full((1, 1, 1, 4), 1e30, np.float32)
    found = sparse_outliers.collect(jnp.asarray(residual), jnp.ones(residual.shape, bool), 4, "float16", False)
    assert np.isfinite(np.asarray(found.residual)).all()
    assert found.dropped is None


@pytest.mark.parametrize(
    ("fraction", "width", "slots"), [(0.01, 4096, 21), (0.01, 1024, 6), (0.01, 128, 1), (0.001, 1024, 1), (0.0, 64, 0)]
)
def test_slots_are_those_of_the_papers_quantile_rule(fraction: float, width: int, slots: int):
    assert slots_per_side(fraction, width) == slots
    if fraction:  # entries on or beyond the interpolated quantiles of distinct numbers
        x = np.random.default_rng(1).permutation(width).astype(float)
        assert (x >= np.quantile(x, 1 - fraction / 2)).sum() == (x <= np.quantile(x, fraction / 2)).sum() == slots


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kvquant:outliers=0.001", r"outliers=0.001 is less than one of 64 values; the smallest usable fraction is 0.01563"),
        ("kvquant:outliers=0.7", "must be 0, or a fraction below 0.5"),
        ("kvquant:outliers=-0.1", "outliers=-0.1 must be finite and not negative"),
        ("kvquant:outliers=some", "cannot be read; expected float"),
        ("kvquant:qnorm=true,datatype=nf", "qnorm=true needs datatype=nuq"),
        ("kvquant:bits=8", "choose from 2, 3, 4"),
        ("int4:group_size=24", r"KV width of 2 heads of 32; sizes: 1, 2, 4, 8, 16, 32, 64"),
    ],
)
def test_options_that_fit_no_cache_are_refused_in_one_line(spec: str, message: str):
    with pytest.raises(ValueError, match=message) as refused:
        kvq.layout(spec, CacheDims(1, 4, 2, 32, 128), 1, 64)
    assert "\n" not in str(refused.value)


def test_a_fraction_that_is_named_as_usable_is_usable():
    for width in (48, 64, 100, 1000, 1024):
        with pytest.raises(ValueError, match="smallest usable") as refused:
            slots_per_side(1e-5, width)
        assert slots_per_side(float(str(refused.value).rsplit(" ", 1)[1]), width) == 1


def test_dropped_outliers_of_live_tokens_are_counted():
    spec = "kvquant:outliers=0.04,sink=0,block=16"  # the first tokens of the sequences are outliers in every channel
    cache = filled(spec, (90,) * 4)
    expected_dropped = expected_kept = 0
    for layer, plan in enumerate(cache.plans):
        own, rows = parameters_of(plan)[0], sequences(4, seed=layer).k_pre[:, :, : plan.regions.body(90)]
        outside = (rows < np.asarray(own["lower"])[:, None]) | (rows > np.asarray(own["upper"])[:, None])
        count = outside.sum(axis=(1, 3))
        expected_dropped += np.maximum(count - 4, 0).sum()
        expected_kept += np.minimum(count, 4).sum() + 4 * count.size  # every value's slots are used
    dropped, kept = kvq.dropped_outliers(cache)
    assert (dropped, kept) == (expected_dropped, expected_kept)
    assert dropped > 1000
    short = kvq.select_rows(cache, [0])
    assert kvq.dropped_outliers(short)[0] * 3 < dropped
    assert kvq.dropped_outliers(filled("kivi:sink=0,recent=12,block=16", (90,) * 4)) == (0, 0)


def test_a_method_without_its_calibration_says_so():
    cache = kvq.init_cache("kvquant:bits=3,outliers=0", CacheDims(1, 4, 2, 32, 128), 1, 64)
    codec = cache.plans[0].k
    with pytest.raises(ValueError, match=r"kvquant needs calibrated scale of k: kvq.prepare_layer or"):
        codec.quantize((), (), jnp.zeros((1, 2, 32, 32)), prefill=True)


def test_an_outlier_is_exact_and_its_neighbours_are_coded_without_it():
    """Values: one huge entry of a token changes nothing for the token's other entries."""
    plan = kvq.init_cache("kvquant:bits=2,outliers=0.04,datatype=nf,scale_dtype=float32", CacheDims(1, 4, 2, 32, 128), 1, 64).plans[0]
    rows = np.random.default_rng(0).normal(size=(1, 2, 32, 32)).astype(np.float32)
    rows[0, 0, :, 3] = 4.0  # the largest entry of every token
    found = []
    for size in (4.0, 4e4):
        rows[0, 0, 7, 3] = size
        body = plan.v.quantize((), (), jnp.asarray(rows), prefill=True)
        found.append(np.array(plan.v.dequantize((), (), body)))
        assert found[-1][0, 0, 7, 3] == pytest.approx(size, rel=1e-6)
    found[0][0, 0, 7, 3] = found[1][0, 0, 7, 3] = 0
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - rows).max() > 0.1, "the other entries are quantized"
