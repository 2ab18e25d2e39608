"""What all commands share in talking to people: errors of one line, tables, JSON, progress. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 160  # columns where stdout is no terminal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class UserError(Exception):
    """Something that the user can put right. Its text is one line; `main` prints it and exits with 2."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))


@contextmanager
def input_errors() -> Iterator[None]:
    """Around the reading and checking of what a user gave: there, these exceptions speak of the input. Anywhere else they are bugs and keep their traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(error) from error


def warn(message: str) -> None:
    print(f"kvq: warning: {message}", file=sys.stderr)


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[str] = ()) -> None:
    """A table on stdout; the columns named in `numeric` are aligned to the right. Cells are printed as they are, brackets included."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(table)


def format_bytes(size: int) -> str:
    """1536 -> 1.50 KiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{size} B"


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Says on stderr what goes on: a spinner in a terminal, a line elsewhere."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(Text(message)):
            yield
    else:
        console.print(Text(f"kvq: {message} ..."), soft_wrap=True)
        yield
