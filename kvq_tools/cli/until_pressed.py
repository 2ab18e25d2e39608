"""Stop a measurement at Ctrl-C and keep its complete numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvq_tools.cli import interruption
from kvq_tools.cli.console import bar

FINISHING = "finishing with what is complete; Ctrl-C again leaves at once"
OF_READ_WINDOWS = "the numbers are of the windows that were read by then"


class UntilPressed:
    """A progress bar whose items end once Ctrl-C is pressed. As long as the first items of the
    first loop are not done, there is nothing to show, and a press interrupts as usual.

    Args:
        first_items: returns how many items give the first complete numbers.
    """

    def __init__(self, first_items: Callable[[Sequence[Any]], int] = lambda items: 1) -> None:
        self.pressed = False
        self._first_items, self._has_numbers = first_items, False

    def __call__(self, items: Sequence[Any], message: str) -> Iterator[Any]:
        if self.pressed:
            return
        shown = iter(bar(items, message))
        if not self._has_numbers:
            yield from itertools.islice(shown, self._first_items(items))
            self._has_numbers = True
        with interruption.noted(FINISHING) as pressed:
            for item in shown:
                if pressed():
                    break
                yield item
            self.pressed = pressed()

    def whole(self, items: Sequence[Any], message: str) -> Iterator[Any]:
        """Yield all items of a later loop, whose numbers are needed. A press ends the next one."""
        with interruption.noted(FINISHING) as pressed:
            yield from bar(items, message)
            self.pressed = self.pressed or pressed()


def first_batch(slices: Sequence[tuple[int, Any]]) -> int:
    """Return how many slices of windows are in the first batch."""
    return sum(batch == 0 for batch, _ in slices)
