"""The fixed-shape store of exact entries: what it keeps, what it drops and counts, and which
fractions it refuses."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import sparse_outliers
from kvq_jax.arrays.sparse_outliers import Pool, outliers_per_side, pool_of, smallest_fraction
from kvq_jax.cache.accounting import OutlierTotals
from kvq_jax.cache.cache import CacheDims
from tests.kvq_jax.cache_runs import filled
from tests.kvq_jax.layer_runs import parameters_of, sequences

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 6, 8


def drawn(share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (residuals, which of them are outliers)."""
    rng = np.random.default_rng(0)
    residual = rng.normal(size=(BATCH, HEADS, TOKENS, HEAD_DIM)).astype(np.float32)
    return residual, rng.uniform(size=residual.shape) < share


@pytest.mark.parametrize(
    ("share", "tokens", "slots"),
    [(0.1, 1, 24), (0.1, 3, 30), (0.0, 2, 4), (0.5, 2, 9), (0.5, 6, 11), (1.0, 1, 1)],
)
def test_the_largest_residuals_of_a_pool_are_added_back_and_the_others_are_counted(
    share: float, tokens: int, slots: int
):
    residual, mask = drawn(share)
    found = sparse_outliers.collect(
        jnp.asarray(residual), jnp.asarray(mask), Pool(tokens, slots, True), "float32"
    )
    restored = np.asarray(sparse_outliers.add(jnp.zeros(residual.shape), found))
    assert found.dropped is not None
    kept, dropped = sparse_outliers.counts(found)
    for b in range(BATCH):
        for p in range(TOKENS // tokens):
            own = np.s_[b, :, p * tokens : (p + 1) * tokens]
            marked = np.where(mask[own], residual[own], 0).ravel()
            largest = np.argsort(-np.abs(marked), kind="stable")[:slots]
            expected = np.zeros_like(marked)
            expected[largest] = marked[largest]
            np.testing.assert_array_equal(restored[own].ravel(), expected, err_msg=f"{b=} {p=}")
            assert int(kept[b, p]) == min(mask[own].sum(), slots)
            assert int(dropped[b, p]) == max(mask[own].sum() - slots, 0)
            used = np.arange(slots) < int(kept[b, p])
            assert (np.asarray(found.residual)[b, p][~used] == 0).all()
            head = np.searchsorted(
                np.asarray(found.ends)[b, p], np.arange(slots)[used], side="right"
            )
            place = head * tokens * HEAD_DIM + np.asarray(found.index)[b, p][used]
            assert (np.diff(place) > 0).all(), "slots are sorted by head, token and channel"


def test_residuals_beyond_the_stored_dtype_saturate():
    residual = np.full((1, 1, 1, 4), 1e30, np.float32)
    found = sparse_outliers.collect(
        jnp.asarray(residual), jnp.ones(residual.shape, bool), Pool(1, 4, False), "float16"
    )
    assert np.isfinite(np.asarray(found.residual)).all()
    assert found.dropped is None


@pytest.mark.parametrize(
    ("block", "per_token", "channels", "tokens", "slots"),
    [
        (32, 42, 128, 32, 1344),
        (32, 2.5, 64, 32, 80),
        (1, 12.3, 128, 1, 13),
        (24, 1, 64, 24, 24),
        (96, 1, 64, 32, 32),  # kernels read spans of 32 tokens in powers of two
        (131, 1, 64, 1, 1),
        (128, 1, 1024, 64, 64),  # places of a head that 16 bits count
        (128, 1000, 128, 64, 64000),  # and slots
    ],
)
def test_a_pool_spans_the_block_or_the_largest_part_that_fits(
    block: int, per_token: float, channels: int, tokens: int, slots: int
):
    assert pool_of(block, per_token, channels, True) == Pool(tokens, slots, True)


def test_heads_that_16_bits_cannot_count_are_refused():
    with pytest.raises(
        ValueError, match="heads of 65537 channels, 2 for each token, do not fit 16-bit indices"
    ):
        pool_of(32, 2, 65537, True)


@pytest.mark.parametrize(
    ("fraction", "width", "slots"),
    [(0.01, 4096, 21), (0.01, 1024, 6), (0.01, 128, 1), (0.001, 1024, 1), (0.0, 64, 0)],
)
def test_slots_are_those_of_the_papers_quantile_rule(fraction: float, width: int, slots: int):
    assert outliers_per_side(fraction, width) == slots
    if fraction:  # entries on or beyond the interpolated quantiles of distinct numbers
        x = np.random.default_rng(1).permutation(width).astype(float)
        assert (
            (x >= np.quantile(x, 1 - fraction / 2)).sum()
            == (x <= np.quantile(x, fraction / 2)).sum()
            == slots
        )


def test_a_fraction_that_is_named_as_usable_is_usable():
    for width in (48, 64, 100, 1000, 1024):
        assert outliers_per_side(smallest_fraction(width), width) == 1
        assert outliers_per_side(smallest_fraction(width) - 1e-5, width) == 0


def test_where_a_fraction_is_less_than_one_entry_keys_share_slots_and_values_have_none():
    dims = CacheDims(1, 4, 2, 32, 128)  # 64 entries a token: one is 1.6 %
    cache = kvq.cache.layout("kvquant", dims, 1, 64)
    keys, values = (codec.facts.outlier_slots(2) for codec in cache.plans[0].codecs)
    assert keys == pytest.approx(0.01 * 64 * 2.25, abs=1 / 32), (
        "keys: the fraction times `slots`, rounded up for a pool of 32 tokens"
    )
    assert values == 0, "a token of values cannot have less than one outlier"
    (told,) = kvq.size.unmet_options(cache)
    assert "values have no outliers" in told, "said for the side that it is true of"
    remedy = float(told.rsplit("outliers=", 1)[1].split()[0])
    assert not kvq.size.unmet_options(
        kvq.cache.layout(f"kvquant:outliers={remedy}", dims, 1, 64)
    ), "the remedy that is named is one"
    for spec in ("kvquant:thresholds=matrix", "kvquant:outliers=0"):
        assert not kvq.size.unmet_options(kvq.cache.layout(spec, dims, 1, 64)), (
            f"{spec} has what it asks for"
        )
    assert (
        sum(
            c.facts.outlier_slots(2)
            for c in kvq.cache.layout("kvquant:outliers=0", dims, 1, 64).plans[0].codecs
        )
        == 0
    )


def test_dropped_outliers_of_live_tokens_are_counted():
    spec = (  # the first tokens of the sequences are outliers in every channel
        "kvquant:outliers=0.04,slots=1,sink=0,block=16"
    )
    cache = filled(spec, (90,) * 4)
    expected = []
    for layer, plan in enumerate(cache.plans):
        own, rows = (
            parameters_of(plan)[0],
            sequences(4, seed=layer).k_pre[:, :, : plan.regions.aged_tokens(90)],
        )
        outside = (rows < np.asarray(own["lower"])[:, None]) | (
            rows > np.asarray(own["upper"])[:, None]
        )
        count = outside.sum(axis=(1, 3)).reshape(4, -1, 16).sum(axis=2)  # of each block
        keys = OutlierTotals(int(np.minimum(count, 64).sum()), int(np.maximum(count - 64, 0).sum()))
        expected.append(
            {"k": keys, "v": OutlierTotals(64 * count.size, 0)}
        )  # every value's slots are used
    found = kvq.size.outlier_totals(cache)
    assert list(found) == expected
    dropped, kept = kvq.size.dropped_outliers(cache)
    assert dropped == sum(layer["k"].dropped for layer in found) > 1000
    assert kept == sum(side.kept for layer in found for side in layer.values())
    assert (
        found[0]["k"].share_dropped
        == found[0]["k"].dropped / (found[0]["k"].dropped + found[0]["k"].kept)
        > 0.1
    )
    assert found[0]["v"].share_dropped == 0
    short = kvq.rows.select(cache, [0])
    assert kvq.size.dropped_outliers(short)[0] * 3 < dropped
    fewer = kvq.size.outlier_totals(dataclasses.replace(cache, lengths=jnp.full(4, 40)))
    assert [layer["v"] for layer in fewer] == [OutlierTotals(64 * 4 * 2, 0)] * len(fewer), (
        "two live blocks"
    )
    assert kvq.size.dropped_outliers(filled("kivi:sink=0,recent=12,block=16", (90,) * 4)) == (0, 0)
    assert kvq.size.outlier_totals(filled("kivi:sink=0,recent=12,block=16", (90,) * 4))[0] == {}
