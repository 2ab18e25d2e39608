"""Bootstrap intervals: their width, what pairing does, and what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality.intervals import mean_interval, ratio_interval


def test_an_interval_of_a_mean_is_that_of_the_normal_approximation():
    windows = np.random.default_rng(1).normal(3, 2, 400)
    low, high = mean_interval(windows.tolist())
    half = 1.96 * windows.std() / math.sqrt(400)
    assert low == pytest.approx(windows.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(windows.mean() + half, abs=0.1 * half)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    inside = [low <= 1 <= high for low, high in (mean_interval(rng.exponential(1, 40).tolist()) for _ in range(200))]
    assert 0.86 < np.mean(inside) < 0.99


def test_what_makes_a_window_hard_for_both_caches_cancels_in_their_ratio():
    rng = np.random.default_rng(3)
    hard = rng.exponential(1, 30)
    one, other = (2 * hard * rng.normal(1, 0.05, 30)).tolist(), hard.tolist()
    low, high = ratio_interval(one, other)
    assert low < 2 < high
    assert high - low < 0.2
    apart = ratio_interval(one, rng.permutation(other).tolist())
    assert apart.high - apart.low > 3 * (high - low), "the same numbers, but not of the same windows"


def test_one_window_has_no_interval_and_no_ratio_to_nothing():
    assert math.isnan(mean_interval([1.0]).low)
    assert math.isnan(ratio_interval([1.0, 2.0], [0.0, 1.0]).low)
    with pytest.raises(ValueError, match="the same windows are needed"):
        ratio_interval([1.0, 2.0], [1.0])
