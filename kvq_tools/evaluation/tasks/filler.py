"""Fill a prompt with text around the hidden facts, up to a given length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

DULL = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
FILE_DEPTH = "where the first answer is first mentioned in the input, to the nearest quarter of it"
CLOSE = 4  # tokens that a prompt may stay below its length even if one more unit might fit


class NoRoomError(ValueError):
    """A prompt is too long even without filler, by `lacking` tokens."""

    def __init__(self, tokens: int, budget: int):
        super().__init__(
            f"a prompt without filler has {tokens} tokens already, and {max(budget, 0)} are left"
            " for it"
        )
        self.lacking = tokens - budget


def fitted(build: Callable[[int], list[int]], maximum: int, budget: int) -> list[int]:
    """Return build(n), the tokens of a prompt with n units of filler, for about the largest n <=
    most that keeps it within `budget` tokens.

    Guesses n by proportion. Raises NoRoomError if even n = 0 is too long.
    """
    low, high, ids = 0, maximum + 1, build(0)
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
    """Return the random generator of one sample. It depends only on the seed, length, depth and
    index."""
    if seed < 0:
        raise ValueError(f"a seed must be at least 0, got {seed}")
    return np.random.default_rng([seed, length, round(1e6 * depth), index])


def words(text: str) -> list[str]:
    return text.split()


def sentences(text: str) -> list[str]:
    """Split a text after . ! or ? and a space. White space becomes one space, as in RULER."""
    return re.split(r"(?<=[.!?]) ", " ".join(text.split()))


def excerpt(units: Sequence[str], maximum: int, rng: np.random.Generator) -> Sequence[str]:
    """Return `maximum` neighbouring units from a random place, or all if there are fewer."""
    start = int(rng.integers(0, max(len(units) - maximum, 0) + 1))
    return units[start : start + maximum]


def depth_of(hidden: str, text: str) -> float | None:
    """Return the depth of the first mention of a hidden fact, to the nearest quarter, or None if
    there is none."""
    at = text.find(hidden)
    return None if at < 0 or not text else round(4 * at / len(text)) / 4
