"""Print tables that fit the terminal without breaking a number or a spec inside.

If a table is too wide, its heads are broken at spaces, then its texts at spaces and its specs after
separators. If that is not enough, the columns are split over several tables, each of which repeats
the columns that name the rows.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 160  # columns if stdout is not a terminal
MIN_TEXT_WIDTH = 12  # least columns of a text that is broken into lines

_PIECES = re.compile(r"[^\s,+]*[\s,+]?")  # a line can end after each piece


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout, or None if stdout is not a terminal."""
    if not Console(file=sys.stdout).is_terminal:
        return None
    return shutil.get_terminal_size().columns  # rich itself believes a COLUMNS of 0


def print_line(text: str) -> None:
    """Print a long line, broken like a table cell if stdout is a terminal."""
    width = terminal_width()
    print(text if width is None else _broken(text, width), flush=True)


def print_table(
    title: str, rows: Sequence[Mapping[str, object]], texts: Sequence[str] | None = ("cache",)
) -> None:
    """Print a titled table.

    Args:
        title: the line above, or "".
        rows: the cells of each row by the heads of their columns. The first row has all columns;
            what another row lacks is left blank. Cells are printed unchanged apart from line
            breaks.
        texts: the columns that hold texts, or None if all do. The others hold numbers, which are
            aligned right and never broken.
    """
    width = terminal_width() or PIPED_WIDTH
    columns = list(rows[0])
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    numeric = [texts is not None and column not in texts for column in columns]
    if title:
        print_line(title)
    for widths in _parts(columns, cells, numeric, width):
        _print_part(columns, cells, numeric, widths, width)


def number(value: float | None, form: str) -> str:
    """Return a number as a cell, in this format: "-" if there is none."""
    return "-" if value is None else f"{value:{form}}"


def layer_runs(
    layers: Iterable[dict[str, Any]], keys: Collection[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, first layer) for each run of neighbouring layers that are equal in these keys.
    The label is their numbers, as in 3 or 3-5."""
    for _, group in groupby(layers, key=lambda layer: [layer.get(key) for key in keys]):
        first, *more = group
        yield "-".join(str(layer["layer"]) for layer in (first, *more[-1:])), first


def _parts(
    columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool], width: int
) -> list[dict[int, int]]:
    """Return the tables to print, each as {column: width}."""
    natural = [
        max(
            [cell_len(line) for row in cells for line in row[i].split("\n")]
            + [cell_len(columns[i])]
        )
        for i in range(len(columns))
    ]
    if _total(natural) <= width:
        return [dict(enumerate(natural))]
    minimum = [
        (
            max([cell_len(row[i]) for row in cells] + [_longest_word(columns[i])])
            if numeric[i]
            else min(natural[i], max(MIN_TEXT_WIDTH, _longest_word(columns[i])))
        )
        for i in range(len(columns))
    ]
    names = range(numeric.index(True) if any(numeric) else 1)
    parts: list[list[int]] = [[*names]]
    for i in range(len(names), len(columns)):
        if len(parts[-1]) > len(names) and _total([minimum[n] for n in [*parts[-1], i]]) > width:
            parts.append([*names])
        parts[-1].append(i)
    return [
        _shared(width, natural, {i: minimum[i] for i in part}, [i for i in part if not numeric[i]])
        for part in parts
    ]


def _shared(
    width: int, natural: Sequence[int], minimum: dict[int, int], texts: Sequence[int]
) -> dict[int, int]:
    """Return the widths of a table's columns: texts share the room that numbers leave, and each
    takes at most what it needs."""
    widths = dict(minimum)
    left = width - _total(list(widths.values()))
    while left > 0 and (short := [i for i in texts if widths[i] < natural[i]]):
        for i in short[:left]:
            widths[i] += 1
        left -= len(short[:left])
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1  # a space on each side, and lines between


def _longest_word(text: str) -> int:
    return max((cell_len(word) for word in text.split()), default=0)


def _print_part(
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    widths: dict[int, int],
    width: int,
) -> None:
    table = Table()
    for i, room in widths.items():
        head = Text(_broken(columns[i], room))
        table.add_column(
            head,
            justify="right" if numeric[i] else "left",
            width=room,
            no_wrap=True,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(Text(_broken(row[i], room)) for i, room in widths.items()))
    Console(
        file=sys.stdout, highlight=False, width=max(width, _total(list(widths.values())))
    ).print(table)


def _broken(text: str, width: int) -> str:
    """Break a text into lines, at spaces and after the separators of a spec. A longer piece stays
    whole if it is a number and is cut otherwise."""
    lines = []
    for whole in text.split("\n"):
        line = ""
        for piece in _PIECES.findall(whole):
            if line and cell_len((line + piece).rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += piece
            while cell_len(line.rstrip()) > width and not re.fullmatch(
                r"[\d.,%eE+-]+", line.rstrip()
            ):
                cut = _cut(line, width)
                lines.append(line[:cut])
                line = line[cut:]
        lines.append(line.rstrip())
    return "\n".join(lines)


def _cut(line: str, width: int) -> int:
    """Return where to cut a long word: after punctuation if there is any, and never between
    digits."""
    marks = [
        n
        for n in range(1, width + 1)
        if line[n - 1] in ":=-_/." and not line[n - 1 : n + 1].isdigit()
    ]
    if marks:
        return marks[-1]
    return next((n for n in range(width, 0, -1) if not line[n - 1 : n + 1].isdigit()), width)
