"""Weighted k-means in one dimension: an exact solution on a coarse histogram, then Lloyd's
iterations on a fine one.

    minimize sum_i w_i min_j (y_i - level_j)^2

In one dimension the optimum cuts the sorted numbers into runs, and dynamic programming finds it
(Wang and Song, Ckmeans.1d.dp). Nothing is random, so the same data give the same levels. The
histogram keeps sums, so levels are means of the numbers and not of bins.

`weighted_levels_of_rows` does the same for many short rows at once, on their sorted numbers in
place of a histogram.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Float, Int

FINE_BINS = 1 << 16
COARSE_BINS = 1 << 10
ITERATIONS = 1000
RUNS = 96  # of a row's numbers, in which its first solution is exact


def nearest(
    y: Float[np.ndarray, " n"], levels: Float[np.ndarray, " entries"]
) -> Int[np.ndarray, " n"]:
    """Return the index of the nearest of the sorted levels, the lower one on a tie."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, y, side="left")


def weighted_levels(
    y: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"] | None, entries: int
) -> Float[np.ndarray, " entries"]:
    """Return `entries` sorted levels for numbers in [-1, 1]. Fewer distinct numbers than entries
    leave some levels equal.

    Raises ValueError if there are no numbers.
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
        moved = np.sort(
            np.divide(np.bincount(code, first, entries), total, out=levels.copy(), where=total > 0)
        )
        if np.array_equal(moved, levels):
            break
        levels = moved
    return levels


def _histogram(y: np.ndarray, weights: np.ndarray | None) -> list[np.ndarray]:
    """Return (sum w, sum w y, sum w y^2) for each of FINE_BINS equal bins over [-1, 1]."""
    index = np.clip(
        ((y.astype(np.float64) + 1) * (FINE_BINS / 2)).astype(np.int64), 0, FINE_BINS - 1
    )
    one = np.ones(1) if weights is None else weights.astype(np.float64)
    return [
        np.bincount(index, np.broadcast_to(one * y.astype(np.float64) ** power, y.shape), FINE_BINS)
        for power in range(3)
    ]


def _coarse(*sums: np.ndarray) -> list[np.ndarray]:
    """Return the sums of at most COARSE_BINS runs of bins. Half of their borders are equally
    spaced, half are at equal shares of the mass."""
    share = np.cumsum(sums[0]) / sums[0].sum()
    even = np.linspace(0, 1, FINE_BINS)
    steps = np.floor((share + even) / 2 * COARSE_BINS).astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    return [np.add.reduceat(s, starts) for s in sums]


def _optimal(sums: list[np.ndarray], entries: int) -> np.ndarray:
    """Return the means of the best cut of bins into `entries` runs. The bins are described by
    sum w, sum w y and sum w y^2."""
    used = sums[0] > 0
    mass, first, second = (np.concatenate([[0.0], np.cumsum(s[used])]) for s in sums)
    size = len(mass) - 1
    weight, moment = mass[None] - mass[:, None], first[None] - first[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = second[None] - second[:, None] - np.square(moment) / weight
    # cost[i, j]: bins i .. j - 1 as one run
    cost = np.where(weight > 0, np.maximum(cost, 0), np.inf)
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


def weighted_levels_of_rows(
    y: Float[np.ndarray, "rows n"], weights: Float[np.ndarray, "rows n"], entries: int
) -> Float[np.ndarray, "rows entries"]:
    """Return `entries` sorted levels for each row, as `weighted_levels` does for one.

    Rows have some thousand numbers, which may be of any size. The first solution is exact on at
    most RUNS runs of a row's sorted numbers. These are as dense as the best levels would lie
    (w^1/3 gap^2/3: Panter and Dite 1951) and cut on both sides of a number, so that one of much
    weight is a run. Every row must have a weight above 0.
    """
    order = np.argsort(y, axis=1)
    y = np.take_along_axis(y, order, axis=1).astype(np.float64)
    middle = (y[:, :1] + y[:, -1:]) / 2
    size = np.maximum((y[:, -1:] - y[:, :1]) / 2, np.finfo(np.float64).tiny)
    y = (y - middle) / size
    weights = np.take_along_axis(weights, order, axis=1).astype(np.float64)
    weights /= weights.sum(axis=1, keepdims=True)
    sums = np.zeros((3, len(y), y.shape[1] + 1))
    for power in range(3):
        np.cumsum(weights * y**power, axis=1, out=sums[power, :, 1:])
    weight, moment, square = _at_runs(y, weights, sums)
    levels = _optimal_cuts(weight, moment, square, entries)
    moving = np.arange(len(y))
    for _ in range(ITERATIONS):
        moved = _lloyd_step(y[moving], sums[:, moving], levels[moving])
        still = (moved != levels[moving]).any(axis=1)
        levels[moving] = moved
        moving = moving[still]
        if not moving.size:
            break
    return levels * size + middle


def _at_runs(
    y: np.ndarray, weights: np.ndarray, sums: Float[np.ndarray, "3 rows ends"]
) -> list[Float[np.ndarray, "rows runs"]]:
    """Return cumulative sums at the borders of at most RUNS runs of each row."""
    numbers = sums.shape[-1] - 1
    if numbers <= RUNS:
        return list(sums)
    share = np.zeros_like(sums[0])
    np.cumsum(np.cbrt(weights * np.square(np.gradient(y, axis=1))), axis=1, out=share[:, 1:])
    share /= np.maximum(share[:, -1:], np.finfo(np.float64).tiny)
    wanted = np.arange(1, RUNS // 2) / (RUNS // 2)
    after = np.clip(
        _searched(share, np.broadcast_to(wanted, (len(share), wanted.size))), 1, numbers
    )
    edge = np.zeros((len(share), 1), after.dtype)
    ends = np.concatenate(
        [edge, np.sort(np.concatenate([after - 1, after], axis=1), axis=1), edge + numbers], axis=1
    )
    return [np.take_along_axis(cumulative, ends, axis=1) for cumulative in sums]


def _optimal_cuts(
    mass: np.ndarray, first: np.ndarray, second: np.ndarray, entries: int
) -> Float[np.ndarray, "rows entries"]:
    """Return the means of the best cut of each row's runs into at most `entries` parts. The runs
    are described by cumulative sums."""

    def between(ends: np.ndarray) -> np.ndarray:
        return ends[:, None, :] - ends[:, :, None]

    weight, moment = between(mass), between(first)
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(weight > 0, np.maximum(between(second) - np.square(moment) / weight, 0), 0)
    backwards = np.tri(mass.shape[1], k=-1, dtype=bool)
    # cost[:, i, j]: runs i .. j - 1 as one part, which may be empty
    cost = np.where(backwards, np.inf, cost)
    best, cuts = cost[:, 0], []
    for _ in range(1, entries):
        through = best[:, :, None] + cost
        cuts.append(through.argmin(axis=1))
        best = np.take_along_axis(through, cuts[-1][:, None], axis=1)[:, 0]
    rows = np.arange(len(mass))
    ends = [np.full(len(mass), mass.shape[1] - 1)]
    for cut in reversed(cuts):
        ends.insert(0, cut[rows, ends[0]])
    return _means(mass, first, np.stack([np.zeros_like(ends[0]), *ends], axis=1))


def _lloyd_step(
    y: np.ndarray, sums: np.ndarray, levels: np.ndarray
) -> Float[np.ndarray, "rows entries"]:
    inner = _searched(y, (levels[:, 1:] + levels[:, :-1]) / 2)
    edge = np.zeros((len(y), 1), inner.dtype)
    ends = np.concatenate([edge, inner, edge + y.shape[1]], axis=1)
    return _means(sums[0], sums[1], ends, levels)


def _means(
    mass: np.ndarray,
    first: np.ndarray,
    ends: Int[np.ndarray, "rows borders"],
    otherwise: np.ndarray | None = None,
) -> np.ndarray:
    """Return the sorted means of the parts between borders. A part without weight has the value
    `otherwise`, or the mean before it."""
    weight, moment = (
        np.diff(np.take_along_axis(cumulative, ends, axis=1), axis=1)
        for cumulative in (mass, first)
    )
    means = np.divide(
        moment,
        weight,
        out=np.full_like(moment, np.nan) if otherwise is None else otherwise.copy(),
        where=weight > 0,
    )
    if otherwise is None:
        means = np.where(np.isnan(means), np.fmax.accumulate(means, axis=1), means)
        means = np.where(np.isnan(means), np.nanmin(means, axis=1, keepdims=True), means)
    return np.sort(means, axis=1)


def _searched(
    rows: Float[np.ndarray, "rows n"], values: Float[np.ndarray, "rows m"]
) -> Int[np.ndarray, "rows m"]:
    """Return the index at which each value belongs among the sorted numbers of its row. All numbers
    and values are in [-1, 1]."""
    apart = 4.0 * np.arange(len(rows))[:, None]
    index = np.searchsorted((rows + apart).ravel(), (values + apart).ravel(), side="right")
    return index.reshape(values.shape) - rows.shape[1] * np.arange(len(rows))[:, None]
