"""95 % intervals of shares of answers. Those of KL, ratios and means over windows of a text are in
kvq_tools/evaluation/intervals.py.

a share of answers          share_interval  Clopper and Pearson: 12 of 12 may still err
a difference of shares      gap_interval    the same, of gains and of losses on equal questions
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv

from kvq_tools.evaluation.intervals import CONFIDENCE, NONE, Interval


def share_interval(scores: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of the mean of scores between 0 and 1: Clopper and Pearson (1934), whose
    limits are quantiles of beta distributions.

    It is conservative for scores of answers that are partly right, which vary less than answers
    that are right or wrong, and for scores of several tasks, which vary less than if the task were
    drawn as well (Hoeffding, On the distribution of the number of successes in independent trials,
    1956). (nan, nan) without scores.
    """
    if not scores:
        return NONE
    n, right, tail = len(scores), float(np.sum(scores)), (1 - confidence) / 2
    low = 0.0 if right <= 0 else float(betaincinv(right, n - right + 1, tail))
    high = 1.0 if right >= n else float(betaincinv(right + 1, n - right, 1 - tail))
    return Interval(low, high)


def gap_interval(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the interval of mean(scores) - mean(others), whose entries belong to the same
    questions.

    Gains (the positive differences) and losses have `share_interval` of 97.5 % each, which hold
    together in at least 95 % of cases (Bonferroni): equal answers to a few questions do not show
    that there is no difference.
    """
    gaps = np.subtract(scores, others)
    each = (1 + CONFIDENCE) / 2
    gains, losses = (share_interval(np.maximum(sign * gaps, 0).tolist(), each) for sign in (1, -1))
    return Interval(gains.low - losses.high, gains.high - losses.low)
