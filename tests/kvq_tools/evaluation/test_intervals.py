"""Intervals hold the truth as often as they say, and say nothing where there is no spread."""

import math

import numpy as np
import pytest

from kvq_tools.evaluation.intervals import kl_interval, mean_interval, paired_ratio, share_interval

DRAWS = 4000


@pytest.mark.parametrize("windows", [2, 8])
def test_a_mean_of_few_windows_lies_in_95_of_100_intervals(windows: int):
    samples = np.random.default_rng(windows).normal(3, 2, (DRAWS, windows)).tolist()
    inside = [low <= 3 <= high for low, high in map(mean_interval, samples)]
    assert 0.93 < np.mean(inside) < 0.97


@pytest.mark.parametrize(
    ("share", "samples", "low", "high"),
    [(0.0, 4, 0.0, 0.4899), (1.0, 20, 0.8389, 1.0), (0.9, 20, 0.6990, 0.9721)],
)
def test_a_share_has_the_limits_of_wilson(share: float, samples: int, low: float, high: float):
    assert share_interval(share, samples) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("windows", [8, 24])
def test_a_mean_of_skewed_windows_lies_in_95_of_100_intervals(windows: int):
    """Logs have a standard deviation of 0.8, as a cache's KL has on texts of two domains."""
    sigma, draws = 0.8, np.random.default_rng(windows)
    samples = draws.lognormal(0, sigma, (DRAWS, windows)).tolist()
    mean, inside, of_logs = math.exp(sigma**2 / 2), 0, 0
    for values in samples:
        low, high = kl_interval(values)
        inside += low <= mean <= high
        low, high = np.exp(mean_interval(np.log(values).tolist()))
        of_logs += low <= mean <= high
    assert 0.93 < inside / DRAWS < 0.97
    assert of_logs / DRAWS < 0.85, "the logs' own interval is about a smaller mean"


def test_a_ratio_of_few_windows_lies_in_95_of_100_intervals():
    """Windows differ by a factor of e, the caches' ratio by 10 % from window to window."""
    windows = 4
    rng = np.random.default_rng(windows)
    hard = rng.lognormal(0, 1, (DRAWS, windows))
    ratios = 2 * rng.lognormal(0, 0.1, (DRAWS, windows))
    inside = []
    for others, ratio in zip(hard, ratios, strict=True):
        low, high = paired_ratio((others * ratio).tolist(), others.tolist()).interval
        inside.append(low <= 2 <= high)
        assert high / low < 3, "what makes a window hard for both caches cancels"
    assert 0.93 < np.mean(inside) < 0.97


def test_a_ratio_is_the_geometric_mean_of_the_ratios_on_the_same_windows():
    value, (low, high) = paired_ratio([1.0, 8.0], [1.0, 2.0])
    assert value == pytest.approx(2.0)
    assert low * high == pytest.approx(4.0), "the interval is symmetric in the log"
    half = 12.706 * math.log(2)  # t of one degree of freedom; the logs' standard error is log 2
    assert math.log(high / 2) == pytest.approx(half, rel=1e-4)
    with pytest.raises(ValueError, match="the same windows"):
        paired_ratio([1.0, 2.0], [1.0])


def test_there_is_no_interval_without_a_spread_and_no_ratio_without_logs():
    for values in ([], [1.0], [0.5, 0.5, 0.5], [1.0, math.nan]):
        assert math.isnan(mean_interval(values).low), values
    assert paired_ratio([1.0], [2.0]).value == 0.5
    assert math.isnan(paired_ratio([1.0], [2.0]).interval.low)
    for windows, others in (([1.0, 2.0], [0.0, 1.0]), ([-1.0, 2.0], [1.0, 1.0]), ([], [])):
        value, interval = paired_ratio(windows, others)
        assert np.isnan([value, *interval]).all(), (windows, others)


def test_two_windows_a_million_times_apart_give_no_interval():
    assert np.isnan(kl_interval([1e-9, 1e-2])).all(), "its upper limit is above every float"
    low, high = kl_interval([1e-3, 1e-2])
    assert 0 < low < 1e-3 < high < math.inf


def test_ratios_too_far_apart_for_a_float_give_no_interval():
    value, interval = paired_ratio([1e-38, 1.0], [1.0, 1e-38])
    assert value == pytest.approx(1)
    assert np.isnan(interval).all(), "its upper limit is above every float"
    assert paired_ratio([1e308], [1e-308]).value == math.inf


def test_rounding_noise_around_zero_has_an_interval_and_equal_values_have_none():
    low, high = kl_interval([-1e-9, 2e-9, 1e-9])
    assert low < 0 < high
    for values in ([0.0, 0.0], [0.5, 0.5], [0.5]):
        assert math.isnan(kl_interval(values).low), values
