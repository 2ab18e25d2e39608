"""Weighted k-means in one dimension: an exact solution on a coarse histogram, then Lloyd's iterations on a fine one.

    minimize sum_i w_i min_j (y_i - level_j)^2

In one dimension the optimum cuts the sorted numbers into runs, and dynamic programming finds it (Wang and Song, Ckmeans.1d.dp). Nothing is
random, so the same data give the same levels. The histogram keeps sums, so levels are means of the numbers and not of bins.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Float, Int

FINE_BINS = 1 << 16
COARSE_BINS = 1 << 10
ITERATIONS = 1000


def nearest(y: Float[np.ndarray, " n"], levels: Float[np.ndarray, " entries"]) -> Int[np.ndarray, " n"]:
    """Return the index of the nearest of the sorted levels; on a tie, that of the lower one."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, y, side="left")


def weighted_levels(y: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"] | None, entries: int) -> Float[np.ndarray, " entries"]:
    """Return `entries` sorted levels for numbers in [-1, 1]. Fewer distinct numbers than entries leave some levels equal.

    Raises ValueError where there are no numbers.
    """
    if not y.size:
        raise ValueError("no element is left to find levels for")
    mass, first, second = _histogram(y, weights)
    levels = _optimal(_coarse(mass, first, second), entries)
    position = np.divide(first, mass, out=np.zeros_like(first), where=mass > 0)
    used = mass > 0
    mass, first, position = mass[used], first[used], position[used]
    for _ in range(ITERATIONS):
        code = nearest(position, levels)
        total = np.bincount(code, mass, entries)
        moved = np.sort(np.divide(np.bincount(code, first, entries), total, out=levels.copy(), where=total > 0))
        if np.array_equal(moved, levels):
            break
        levels = moved
    return levels


def _histogram(y: np.ndarray, weights: np.ndarray | None) -> list[np.ndarray]:
    """Return (sum w, sum w y, sum w y^2) for each of FINE_BINS equal bins over [-1, 1]."""
    index = np.clip(((y.astype(np.float64) + 1) * (FINE_BINS / 2)).astype(np.int64), 0, FINE_BINS - 1)
    one = np.ones(1) if weights is None else weights.astype(np.float64)
    return [np.bincount(index, np.broadcast_to(one * y.astype(np.float64) ** power, y.shape), FINE_BINS) for power in range(3)]


def _coarse(*sums: np.ndarray) -> list[np.ndarray]:
    """Return the sums of at most COARSE_BINS runs of bins: half of their borders equally spaced, half at equal shares of the mass."""
    share = np.cumsum(sums[0]) / sums[0].sum()
    even = np.linspace(0, 1, FINE_BINS)
    steps = np.floor((share + even) / 2 * COARSE_BINS).astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    return [np.add.reduceat(s, starts) for s in sums]


def _optimal(sums: list[np.ndarray], entries: int) -> np.ndarray:
    """Return the means of the best cut of bins, given by sum w, sum w y and sum w y^2, into `entries` runs."""
    used = sums[0] > 0
    mass, first, second = (np.concatenate([[0.0], np.cumsum(s[used])]) for s in sums)
    size = len(mass) - 1
    weight, moment = mass[None] - mass[:, None], first[None] - first[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = second[None] - second[:, None] - np.square(moment) / weight
    cost = np.where(weight > 0, np.maximum(cost, 0), np.inf)  # cost[i, j]: bins i .. j - 1 as one run
    best, cuts = cost[0], []
    for _ in range(1, min(entries, size)):
        through = best[:, None] + cost
        cuts.append(np.argmin(through, axis=0))
        best = np.take_along_axis(through, cuts[-1][None], axis=0)[0]
    ends = [size]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends = [0, *reversed(ends)]
    means = [moment[a, b] / weight[a, b] for a, b in itertools.pairwise(ends)]
    return np.asarray(means + [means[-1]] * (entries - len(means)))
