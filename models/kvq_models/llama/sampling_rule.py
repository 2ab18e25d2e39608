"""The rule by which a token is drawn, and the range of each of its values. Checkpoints ask for one,
so this file imports no JAX."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from typing import Any

MAX_TEMPERATURE = 3.4e38  # the largest float32; JSON has integers that no float holds

# functions that make a Python number of each choice, or fail
_PLAIN = {"temperature": float, "top_k": operator.index, "top_p": float, "min_p": float}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda value: 0 <= value <= MAX_TEMPERATURE,
        "at least 0 (0 is greedy) and finite",
    ),
    "top_k": (lambda value: 0 <= value < 2**31, "at least 0 (0 keeps all tokens) and below 2**31"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
}


def check_choice(name: str, value: Any) -> None:
    """Raise ValueError, in one line, if a field of `Sampling` cannot have this value: it is out of
    range or not a number."""
    plain, (in_range, told) = _PLAIN[name], _RANGES[name]
    number: Any
    try:
        # float reads texts, and a bool is an index
        number = None if isinstance(value, bool | str) else plain(value)
    except OverflowError:  # a larger integer than floats hold, which is out of range
        number = value
    except (TypeError, ValueError):
        number = None
    if number is None:
        told = "an integer" if plain is operator.index else "a number"
    if number is None or not in_range(number):
        raise ValueError(f"{name}={reprlib.repr(value)} must be {told}")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The rule by which a token is drawn. Static and hashable. The default is greedy.

    Args:
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: then keep the fewest tokens whose probabilities add up to it.
        min_p: then keep tokens whose probability is at least min_p times the highest.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def check(self) -> None:
        """Raise ValueError, in one line, if a value is out of range or not a number."""
        for name in _PLAIN:
            check_choice(name, getattr(self, name))
