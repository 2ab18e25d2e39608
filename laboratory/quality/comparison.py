"""Comparisons: tables of caches, each a grid like those that papers print."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvq_models import Llama

PLAIN = "as it is"  # the variant that is the model itself


@dataclasses.dataclass(frozen=True)
class Entry:
    """One cache of a table.

    cells: name the line, as the paper does.
    column: place in the line, in a grid of two settings.
    other_text: calibrate on the other calibration text.
    """

    cells: tuple[str, ...]
    cache: str
    column: str = ""
    other_text: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A table.

    heads: name the cells.
    against: cells of the line that the others are compared with, or ().
    stressed: measure on all variants of the suite if the run asks for them.
    fake: also quantize every token in one pass (`kvq eval --mode fake`), as papers simulate.
    """

    title: str
    heads: tuple[str, ...]
    entries: tuple[Entry, ...]
    against: tuple[str, ...] = ()
    stressed: bool = False
    fake: bool = False


@dataclasses.dataclass(frozen=True)
class Suite:
    """Comparisons that one command runs.

    variants: make other models with the same outputs as long as the cache is exact.
    """

    title: str
    comparisons: tuple[Comparison, ...]
    variants: Mapping[str, Callable[[Llama], Llama]] = dataclasses.field(default_factory=dict)


def listed(
    title: str,
    named: Iterable[tuple[str, str]],
    against: str = "",
    *,
    stressed: bool = False,
    fake: bool = False,
) -> Comparison:
    """Return a table whose lines are named by one cell. Repeated lines are dropped.

    against: name of the line that the others are compared with.
    """
    entries = tuple(Entry((name,), cache) for name, cache in dict.fromkeys(named))
    return Comparison(title, ("cache",), entries, (against,) if against else (), stressed, fake)


def swept(
    title: str, head: str, lines: Iterable[tuple[str, Iterable[tuple[str, str]]]]
) -> Comparison:
    """Return a grid with (column, cache) pairs for each line, measured on all variants."""

    def entries() -> Iterator[Entry]:
        for name, cells in lines:
            for column, cache in cells:
                yield Entry((name,), cache, column)

    return Comparison(title, (head,), tuple(entries()), stressed=True)
