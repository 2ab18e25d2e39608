"""Bootstrap intervals: their width, what pairing does, and what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality.intervals import Weights, estimate, mean_interval, ratio_interval


def test_an_interval_of_a_mean_is_that_of_the_normal_approximation():
    windows = np.random.default_rng(1).normal(3, 2, 400)
    low, high = mean_interval(windows.tolist())
    half = 1.96 * windows.std() / math.sqrt(400)
    assert low == pytest.approx(windows.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(windows.mean() + half, abs=0.1 * half)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    inside = [
        low <= 1 <= high
        for low, high in (mean_interval(rng.exponential(1, 40).tolist()) for _ in range(200))
    ]
    assert 0.86 < np.mean(inside) < 0.99


def test_what_makes_a_window_hard_for_both_caches_cancels_in_their_ratio():
    rng = np.random.default_rng(3)
    hard = rng.exponential(1, 30)
    one, other = (2 * hard * rng.normal(1, 0.05, 30)).tolist(), hard.tolist()
    low, high = ratio_interval(one, other)
    assert low < 2 < high
    assert high - low < 0.2
    apart = ratio_interval(one, rng.permutation(other).tolist())
    assert apart.high - apart.low > 3 * (high - low), (
        "the same numbers, but not of the same windows"
    )


def test_a_statistic_of_several_measurements_draws_their_windows_together():
    """The geometric mean of the ratios of two layers; of one layer alone it is the ratio itself."""
    rng = np.random.default_rng(4)
    kivi = rng.exponential(1, (30, 2))
    ours = kivi * [0.5, 0.8] * rng.normal(1, 0.05, (30, 1))

    def ratio(weights: Weights) -> np.ndarray:
        return np.exp(np.log((weights @ ours) / (weights @ kivi)).mean(axis=1))

    value, (low, high) = estimate(ratio, 30)
    assert value == pytest.approx(math.sqrt(0.5 * 0.8), abs=0.02)
    assert low < value < high
    assert high - low < 0.05
    one = estimate(lambda weights: (weights @ ours[:, 0]) / (weights @ kivi[:, 0]), 30)
    assert one.interval == ratio_interval(ours[:, 0].tolist(), kivi[:, 0].tolist())
    ours = rng.permutation(ours)
    apart = estimate(ratio, 30).interval
    assert apart.high - apart.low > 3 * (high - low), (
        "the same numbers, but not of the same windows"
    )


def test_the_largest_of_means_is_looked_for_again_in_every_set_of_windows():
    """Four windows of two channels, of which the second is ahead in one window, by so much that it
    has the larger mean."""
    channels = np.asarray([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 4.0]])
    value, (low, high) = estimate(
        lambda weights: (weights @ channels).argmax(axis=1).astype(float), 4
    )
    assert (value, low, high) == (1.0, 0.0, 1.0)
    assert math.isnan(estimate(lambda weights: weights[:, 0], 1).interval.low)


def test_one_window_has_no_interval_and_no_ratio_to_nothing():
    assert math.isnan(mean_interval([1.0]).low)
    assert math.isnan(ratio_interval([1.0, 2.0], [0.0, 1.0]).low)
    with pytest.raises(ValueError, match="the same windows are needed"):
        ratio_interval([1.0, 2.0], [1.0])
