"""Bootstrap intervals of means over windows of a text, and of what else is made of them.

A text's windows are drawn with replacement, as many as there are, 10,000 times; the interval holds
the middle 95 % of the means (percentile bootstrap, Efron 1979). Two caches that were measured on
the same windows are compared by the ratio of their means with the same draws: what makes a window
hard for both then cancels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

DRAWS = 10_000
MIDDLE = 2.5, 97.5  # percent

Weights = Float[
    np.ndarray, "sets windows"
]  # of the windows in each set, which add up to 1: the mean of a set is weights @ windows
Statistic = Callable[[Weights], Float[np.ndarray, "sets"]]  # a number of each set of windows


class Interval(NamedTuple):
    """The middle 95 % of a number of resampled windows."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A number of the windows that were measured, and its interval."""

    value: float
    interval: Interval


def mean_interval(windows: Sequence[float]) -> Interval:
    """Return the interval of the mean of a number of each window; (nan, nan) for fewer than two
    windows."""
    return _interval(lambda weights: weights @ np.asarray(windows), len(windows))


def ratio_interval(windows: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the interval of mean(windows) / mean(others), whose entries belong to the same
    windows; nan where it is not defined."""
    if len(windows) != len(others):
        raise ValueError(
            f"the same windows are needed for a ratio: {len(windows)} and {len(others)} are given"
        )
    if len(windows) < 2 or min(others) <= 0:
        return Interval(math.nan, math.nan)
    return _interval(
        lambda weights: (weights @ np.asarray(windows)) / (weights @ np.asarray(others)),
        len(windows),
    )


def estimate(statistic: Statistic, windows: int) -> Estimate:
    """Return any number that follows from a set of windows, such as a share of the layers, for all
    of them and with its interval.

    The statistic may read several measurements of the same windows, which are then drawn together.
    The interval is (nan, nan) for fewer than two windows.
    """
    return Estimate(
        float(statistic(np.full((1, windows), 1 / windows))[0]), _interval(statistic, windows)
    )


def _interval(statistic: Statistic, windows: int) -> Interval:
    if windows < 2:
        return Interval(math.nan, math.nan)
    low, high = np.percentile(statistic(_drawn(windows)), MIDDLE)
    return Interval(float(low), float(high))


@functools.cache
def _drawn(windows: int) -> Weights:
    """Return the weights of windows that are drawn with replacement; every call for as many windows
    returns the same ones."""
    drawn = np.random.default_rng(0).integers(0, windows, (DRAWS, windows))
    counts = np.bincount(
        (drawn + windows * np.arange(DRAWS)[:, None]).ravel(), minlength=drawn.size
    )
    return counts.reshape(drawn.shape) / windows
