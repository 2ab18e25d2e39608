"""The type of progress bars for long loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[
    [Sequence[T], str], Iterable[T]
]  # yields the items and shows how many are done beside a message, as tqdm does
