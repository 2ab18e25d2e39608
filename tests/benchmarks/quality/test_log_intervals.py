"""t intervals over the logs of windows: their width by hand, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality.intervals import mean_interval
from benchmarks.quality.log_intervals import t_interval


def test_the_factor_is_the_t_quantile_times_the_error_of_the_mean_log():
    low, high = t_interval([1.0, math.e, math.e**2, math.e**3])
    mean = (1 + math.e + math.e**2 + math.e**3) / 4
    half = 3.1824 * math.sqrt(5 / 3) / 2  # three degrees of freedom; logs 0, 1, 2 and 3
    assert (low, high) == pytest.approx((mean * math.exp(-half), mean * math.exp(half)), rel=1e-4)


def test_four_windows_hold_the_truth_as_often_as_they_say_and_the_bootstrap_does_not():
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(-0.125, 0.5, (500, 4))  # of mean 1
    inside = [low <= 1 <= high for low, high in map(t_interval, drawn.tolist())]
    bootstrap = [low <= 1 <= high for low, high in map(mean_interval, drawn.tolist())]
    assert 0.92 < np.mean(inside) < 0.98
    assert np.mean(bootstrap) < 0.88


@pytest.mark.parametrize("windows", [[0.5], [0.5, 0.0], []])
def test_there_is_none_for_one_window_or_a_value_that_has_no_log(windows):
    assert all(map(math.isnan, t_interval(windows)))
