"""95 % intervals of means over windows of a text, of ratios, and of shares of answers.

a mean KL                   kl_interval     t, of the logs: windows' KL are positive and skewed
a ratio of two caches' KL   paired_ratio    t, of the logs of the ratios on the same windows
nats, cosines, errors       mean_interval   t: the means of windows are nearly symmetric
a share of answers          share_interval  Clopper and Pearson: 12 of 12 may still err
a difference of shares      gap_interval    the same, of gains and of losses on equal questions
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv

from kvq_tools.evaluation.intervals import (
    CONFIDENCE,
    NONE,
    Estimate,
    Interval,
    equal,
    mean_interval,
    paired_ratio,
    t_quantile,
)

__all__ = [
    "Estimate",
    "Interval",
    "gap_interval",
    "kl_interval",
    "mean_interval",
    "paired_ratio",
    "share_interval",
]


def kl_interval(windows: Sequence[float]) -> Interval:
    """Return the interval of the mean of positive, skewed values.

        m + v / 2 +- t sqrt(v / n + v^2 / (2 (n - 1))),   m, v the mean and variance of the logs,

    whose exponentials bound the arithmetic mean if the values are log-normal (Olsson, Confidence
    intervals for the mean of a log-normal distribution, Journal of Statistics Education 13, 2005,
    the modified Cox method). The t interval of the logs alone would bound their geometric mean,
    which is smaller than the mean that pages print. Values that are not all positive, as a KL of
    rounding noise, have the interval of `mean_interval`.
    """
    if len(windows) < 2 or min(windows) <= 0 or equal(windows):
        return mean_interval(windows)
    logs = np.log(windows)
    variance, n = float(logs.var(ddof=1)), len(windows)
    centre = float(logs.mean()) + variance / 2
    half = t_quantile(n) * math.sqrt(variance / n + variance**2 / (2 * (n - 1)))
    return Interval(math.exp(centre - half), math.exp(centre + half))


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
