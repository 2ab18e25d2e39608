"""Intervals of shares of answers: where they end."""

from __future__ import annotations

import pytest

from laboratory.quality.intervals import gap_interval, share_interval


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
