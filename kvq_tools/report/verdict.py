"""Say which of several caches to take: a sentence computed from bits per element (stored or
resident, as the caller counts) and KL.

A cache is named only among caches that keep as many tokens exact, since windows move the KL as much
as a method does, and only if the paired interval of its KL over that of every smaller named cache
leaves out 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvq_tools.evaluation.intervals import Interval, paired_ratio, rounding_of_mean, widened

MIN_KL = 1e-6  # smaller ones are what rounding leaves of equal distributions
BF16_BITS = 16
# tolerance for body shares: they depend a little on the block even if windows are equal
SAME_SHARE = 0.02


class WindowSizes(NamedTuple):
    """The exact tokens of a cache, and the share of the tokens in it that are read quantized."""

    sink: int
    recent: int
    body_share: float

    def equal(self, other: WindowSizes) -> bool:
        return self[:2] == other[:2] and abs(self.body_share - other.body_share) <= SAME_SHARE


class Choice(NamedTuple):
    """A cache to choose from. numbers: what the sentence says of it. window_kl: the means of the
    windows of a text, the same windows for every choice. rounding: by how much a window's log KL
    moves in other batches, or 0 if that was not measured."""

    name: str
    bits: float
    kl: float | None
    numbers: str
    windows: WindowSizes
    window_kl: tuple[float | None, ...]
    rounding: float = 0.0

    @property
    def changes_predictions(self) -> bool:
        return (self.kl or 0) > MIN_KL

    def over(self, other: Choice) -> Interval:
        """Return the interval of this KL over another cache's; (nan, nan) if it has none."""
        ratio = paired_ratio(_numbers(self.window_kl), _numbers(other.window_kl))
        noise = rounding_of_mean(math.hypot(self.rounding, other.rounding), len(self.window_kl))
        return widened(ratio.interval, noise)


class Comparison(NamedTuple):
    """The outcome of a comparison.

    Args:
        named: the caches to take, the smallest first.
        further: no smaller than a named one, and further from full precision.
        untold: the others, each with the named one that it is not told apart from.
    """

    named: list[Choice]
    further: list[Choice]
    untold: list[tuple[Choice, Choice]]


def front(points: Sequence[tuple[float, float | None]]) -> tuple[bool, ...]:
    """Mark the points (size, loss) on the Pareto front: no other is at most as large, loses at most
    as much, and less of one of them. Points without a loss are not on it."""

    def better(a: tuple[float, float | None], b: tuple[float, float | None]) -> bool:
        return (
            a[1] is not None
            and b[1] is not None
            and a[0] <= b[0]
            and a[1] <= b[1]
            and (a[0], a[1]) != (b[0], b[1])
        )

    return tuple(
        point[1] is not None and not any(better(other, point) for other in points)
        for point in points
    )


def compared(choices: Sequence[Choice]) -> Comparison:
    """Compare caches with equal windows, from the smallest to the largest."""
    named: list[Choice] = []
    further: list[Choice] = []
    untold: list[tuple[Choice, Choice]] = []
    for choice in sorted(choices, key=lambda choice: (choice.bits, choice.kl)):
        intervals = [choice.over(other) for other in named]
        if any(interval.low > 1 for interval in intervals):
            further.append(choice)
        elif all(interval.high < 1 for interval in intervals):
            named.append(choice)
        else:
            pairs = zip(named, intervals, strict=True)
            rival = [other for other, interval in pairs if not interval.high < 1][-1]
            untold.append((choice, rival))
    return Comparison(named, further, untold)


def sentence(choices: Sequence[Choice]) -> str:
    """Return the sentence: the named caches, the largest first, and what becomes of the others.
    Caches that are full precision in all but name are left out."""
    lossy = [choice for choice in choices if choice.changes_predictions and choice.bits < BF16_BITS]
    if not lossy:
        return (
            "None of these caches is smaller than bfloat16 and changes what the model predicts;"
            " nothing is to be chosen."
        )
    if not all(choice.windows.equal(lossy[0].windows) for choice in lossy):
        shares = [choice.windows.body_share for choice in lossy]
        return (
            "No cache is named, because they keep different tokens exact"
            f" ({min(shares):.0%} to {max(shares):.0%} of the tokens are read quantized), which"
            " moves the KL as much as a method does: give all of them the same `sink`, `recent` and"
            " `block`."
        )
    return _told(compared(lossy))


def _told(comparison: Comparison) -> str:
    best = comparison.named[::-1]
    digits = 1 if len({f"{choice.bits:.1f}" for choice in best}) == len(best) else 2
    clauses = [
        f"{'at' if i else 'At'} {choice.bits:.{digits}f} bits take {choice.name} ({choice.numbers})"
        for i, choice in enumerate(best)
    ]
    parts = [", ".join(clauses)]
    for rival in best:
        names = [choice.name for choice, other in comparison.untold if other is rival]
        if names:
            parts.append(f"{_listed(names)} not told apart from {rival.name}")
    if comparison.further:
        names = [choice.name for choice in comparison.further]
        parts.append(f"{_listed(names)} no smaller and further from full precision")
    return "; ".join(parts) + "."


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"


def _numbers(window_kl: Sequence[float | None]) -> list[float]:
    return [math.nan if kl is None else kl for kl in window_kl]
