"""Comparisons: tables of caches, each a grid like those that papers print."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from kvq_tools.evaluation.stress import Outliers, Stress

PLAIN = "as it is"
OUTLIERS = Outliers(
    channels=4, factor=12
)  # no power of two: scales would take that up, and codes stay as they are
VARIANTS = {  # of a model, with the same outputs as long as the cache is exact
    PLAIN: None,
    "key outliers": Stress(key_outliers=OUTLIERS),
    "value outliers": Stress(value_outliers=OUTLIERS),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One cache. cells name its line, as the paper does; column is where in the line it stands, in
    grids of two settings; other_text: it is calibrated on the other calibration text."""

    cells: tuple[str, ...]
    cache: str
    column: str = ""
    other_text: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A table. heads name the cells. against: the cells of the line that the others are compared
    with, or (). With `stressed` it is run on all variants of the model where a run asks for them,
    else on the model as it is. With `fake` every token is quantized in one pass as well (`kvq eval
    --mode fake`), as the paper's own simulation does."""

    title: str
    heads: tuple[str, ...]
    entries: tuple[Entry, ...]
    against: tuple[str, ...] = ()
    stressed: bool = False
    fake: bool = False


@dataclasses.dataclass(frozen=True)
class Suite:
    """Comparisons that one command runs."""

    title: str
    comparisons: tuple[Comparison, ...]


def listed(
    title: str,
    named: Iterable[tuple[str, str]],
    against: str = "",
    *,
    stressed: bool = False,
    fake: bool = False,
) -> Comparison:
    """Return a table whose lines are named by one cell; a line that is given again is left out.
    against: the name of the line that the others are compared with."""
    entries = tuple(Entry((name,), cache) for name, cache in dict.fromkeys(named))
    return Comparison(title, ("cache",), entries, (against,) if against else (), stressed, fake)


def swept(
    title: str, head: str, lines: Iterable[tuple[str, Iterable[tuple[str, str]]]]
) -> Comparison:
    """Return a grid: for each line, (column, cache) pairs. On all variants."""

    def entries() -> Iterator[Entry]:
        for name, cells in lines:
            for column, cache in cells:
                yield Entry((name,), cache, column)

    return Comparison(title, (head,), tuple(entries()), stressed=True)
