"""Bootstrap intervals of means over windows of a text.

A text's windows are drawn with replacement, as many as there are, 10,000 times; the interval holds the middle 95 % of the means (percentile
bootstrap, Efron 1979). Two caches that were measured on the same windows are compared by the ratio of their means with the same draws: what
makes a window hard for both then cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

DRAWS = 10_000
MIDDLE = 2.5, 97.5  # percent


class Interval(NamedTuple):
    """The middle 95 % of the means of resampled windows."""

    low: float
    high: float


def mean_interval(windows: Sequence[float]) -> Interval:
    """Return the interval of the mean of a number of each window; (nan, nan) for fewer than two windows."""
    if len(windows) < 2:
        return Interval(math.nan, math.nan)
    return _middle(np.asarray(windows)[_draws(len(windows))].mean(axis=1))


def ratio_interval(windows: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the interval of mean(windows) / mean(others), whose entries belong to the same windows; nan where it is not defined."""
    if len(windows) != len(others):
        raise ValueError(f"the same windows are needed for a ratio: {len(windows)} and {len(others)} are given")
    if len(windows) < 2 or min(others) <= 0:
        return Interval(math.nan, math.nan)
    draws = _draws(len(windows))
    return _middle(np.asarray(windows)[draws].mean(axis=1) / np.asarray(others)[draws].mean(axis=1))


def _draws(windows: int) -> Int[np.ndarray, "draws windows"]:
    return np.random.default_rng(0).integers(0, windows, (DRAWS, windows))


def _middle(means: Float[np.ndarray, "draws"]) -> Interval:
    low, high = np.percentile(means, MIDDLE)
    return Interval(float(low), float(high))
