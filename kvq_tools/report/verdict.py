"""Say which of several caches to take: a sentence computed from the front of KL against stored
bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_KL = 1e-6  # smaller ones are what rounding leaves of equal distributions
BF16_BITS = 16


class Choice(NamedTuple):
    """A cache to choose from. told: its name and its numbers, as the sentence has them."""

    bits: float
    kl: float | None
    told: str

    @property
    def changes_predictions(self) -> bool:
        return (self.kl or 0) > LEAST_KL


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


def sentence(choices: Sequence[Choice]) -> str:
    """Return the sentence: the choices on the front, the largest first, without those that are full
    precision in all but name."""
    on_front = front([(choice.bits, choice.kl) for choice in choices])
    lossy = [
        (choice, on)
        for choice, on in zip(choices, on_front, strict=True)
        if choice.changes_predictions
    ]
    best = sorted(
        (choice for choice, on in lossy if on and choice.bits < BF16_BITS),
        key=lambda choice: -choice.bits,
    )
    if not best:
        return (
            "None of these caches is smaller than bfloat16 and changes what the model predicts;"
            " nothing is to be chosen."
        )
    digits = 1 if len({f"{choice.bits:.1f}" for choice in best}) == len(best) else 2
    first, *others = (
        f"{'at' if i else 'At'} {choice.bits:.{digits}f} bits take {choice.told}"
        for i, choice in enumerate(best)
    )
    left = len(lossy) - len(best)
    rest = (
        f"; the other {left} {'is' if left == 1 else 'are'} larger or further from full precision"
        if left
        else ""
    )
    return ", ".join([first, *others]) + rest + "."
