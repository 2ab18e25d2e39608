"""The type of progress bars for long loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
# yields the items and shows a message with the number that are done, as tqdm does
Progress = Callable[[Sequence[T], str], Iterable[T]]


def silent(items: Sequence[T], message: str) -> Sequence[T]:
    """Return the items: a progress bar that shows nothing."""
    return items
