"""Fill a prompt with text around what is hidden, up to a given length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

DULL = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CLOSE = 4  # tokens that a prompt may stay below its length where one unit more might still fit


class NoRoomError(ValueError):
    """Raised where a prompt is too long even without filler. lacking: the tokens by which it is."""

    def __init__(self, tokens: int, budget: int):
        super().__init__(
            f"a prompt without filler has {tokens} tokens already, and {budget} are left for it"
        )
        self.lacking = tokens - budget


def fitted(build: Callable[[int], list[int]], most: int, budget: int) -> list[int]:
    """Return build(n), the tokens of a prompt with n units of filler, for about the largest n <=
    most that gives at most `budget` tokens.

    Searched with guesses by proportion. NoRoomError if even n = 0 is too long.
    """
    low, high, ids = 0, most + 1, build(0)
    if len(ids) > budget:
        raise NoRoomError(len(ids), budget)
    per_unit = 1.0
    while high - low > 1 and budget - len(ids) > CLOSE:
        guess = min(max(low + int((budget - len(ids)) / per_unit), low + 1), high - 1)
        tried = build(guess)
        per_unit = max((len(tried) - len(ids)) / (guess - low), 0.05)
        if len(tried) <= budget:
            low, ids = guess, tried
        else:
            high = guess
    return ids


def generator(seed: int, length: int, depth: float, index: int) -> np.random.Generator:
    """Return the generator of one sample: another for each length, depth and index, the same
    whatever else is asked for."""
    if seed < 0:
        raise ValueError(f"a seed must be at least 0, got {seed}")
    return np.random.default_rng([seed, length, round(1e6 * depth), index])


def words(text: str) -> list[str]:
    return text.split()


def sentences(text: str) -> list[str]:
    """Split a text after . ! or ? and a space; white space is one space, as RULER has it."""
    return re.split(r"(?<=[.!?]) ", " ".join(text.split()))


def excerpt(units: Sequence[str], most: int, rng: np.random.Generator) -> Sequence[str]:
    """Return `most` neighbouring units from a random place, all where there are no more."""
    start = int(rng.integers(0, max(len(units) - most, 0) + 1))
    return units[start : start + most]


def depth_of(hidden: str, text: str) -> float | None:
    """Return the depth of the first mention of what is hidden, to the nearest quarter; None if
    there is none."""
    at = text.find(hidden)
    return None if at < 0 or not text else round(4 * at / len(text)) / 4
