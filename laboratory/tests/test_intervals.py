"""Intervals of KL and of shares of answers: how often they hold the truth, and where they end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laboratory.quality.intervals import gap_interval, kl_interval, share_interval

DRAWS = 4000
SPREAD = 0.5  # standard deviation of the logs: the committed windows have 0.1 to 0.8
MEAN = math.exp(SPREAD**2 / 2)


def coverage(interval, windows: int, draws: int) -> float:
    samples = np.random.default_rng(windows).lognormal(0, SPREAD, (draws, windows))
    return float(np.mean([low <= MEAN <= high for low, high in map(interval, samples)]))


@pytest.mark.parametrize("windows", [4, 10])
def test_the_mean_kl_of_few_windows_lies_in_95_of_100_intervals(windows: int):
    assert 0.93 < coverage(lambda values: kl_interval(values.tolist()), windows, DRAWS) < 0.97


def test_rounding_noise_around_zero_has_an_interval_and_equal_values_have_none():
    low, high = kl_interval([-1e-9, 2e-9, 1e-9])
    assert low < 0 < high
    assert math.isnan(kl_interval([0.0, 0.0]).low)
    assert math.isnan(kl_interval([0.5, 0.5]).low)
    assert math.isnan(kl_interval([0.5]).low)


@pytest.mark.parametrize(
    ("right", "questions", "low", "high"),
    [(12, 12, 0.7354, 1.0), (0, 4, 0.0, 0.6024), (5, 10, 0.1871, 0.8129)],
)
def test_shares_have_the_limits_of_clopper_and_pearson(
    right: int, questions: int, low: float, high: float
):
    """Limits as in tables of the exact binomial interval."""
    scores = [1.0] * right + [0.0] * (questions - right)
    assert share_interval(scores) == pytest.approx((low, high), abs=1e-4)


def test_equal_answers_to_a_few_questions_do_not_show_that_there_is_no_difference():
    low, high = gap_interval([1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0])
    assert low == pytest.approx(-high)
    assert high > 0.5
    low, high = gap_interval([0.0] * 12, [1.0] * 12)
    assert -1 == low < high < -0.3
