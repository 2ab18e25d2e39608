"""How long loops show how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[Sequence[T], str], Iterable[T]]  # shows how far a loop over these items is, and what it does
