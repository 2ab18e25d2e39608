"""Intervals of a mean over a few windows, from the t distribution of the logs of the windows'
values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from benchmarks.quality.intervals import Interval

CONFIDENCE = 0.95


def t_interval(windows: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of n windows with positive values x:

        mean(x) exp(-h) .. mean(x) exp(h),     h = t_{n-1} sd(log x) / sqrt(n)

    (nan, nan) for fewer than two windows, and if a value is not positive.
    """
    values = np.asarray(windows, np.float64)
    if values.size < 2 or values.min() <= 0:
        return Interval(math.nan, math.nan)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, values.size - 1)
    half = float(quantile * np.log(values).std(ddof=1) / math.sqrt(values.size))
    mean = float(values.mean())
    return Interval(mean * math.exp(-half), mean * math.exp(half))
