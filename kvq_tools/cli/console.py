"""How commands talk: errors of one line, tables, JSON, progress. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import _thread
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

PIPED_WIDTH = 160  # columns where stdout is no terminal

T = TypeVar("T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class UserError(Exception):
    """Something that the user can put right. Its text is one line; `main` prints it and exits with 2."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))


@contextmanager
def input_errors() -> Iterator[None]:
    """Around reading and checking what a user gave: there these exceptions speak of the input, elsewhere they are bugs with a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(error) from error


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python would drop: JAX has a callback in garbage collections, and what is raised in there is only printed."""
    report = sys.unraisablehook
    lost, done = threading.Event(), threading.Event()

    def note(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            lost.set()  # and nothing else: an interrupt that arrives in here would be dropped too
        else:
            report(dropped)

    def repeat() -> None:
        while lost.wait() and not done.is_set():
            lost.clear()
            done.wait(0.1)  # until the hook and the collection are over
            if not done.is_set():
                _thread.interrupt_main()

    threading.Thread(target=repeat, daemon=True).start()
    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = report
        done.set()
        lost.set()


def warn(message: str) -> None:
    print(f"kvq: warning: {message}", file=sys.stderr)


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[str] = ()) -> None:
    """A titled table on stdout; columns named in `numeric` are aligned to the right. Cells are printed as they are."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    if title:
        print(title)
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


def bar(items: Sequence[T], message: str) -> Iterator[T]:
    """The items of a long loop, with a bar on stderr in a terminal and a line elsewhere; neither where there are none."""
    shown = sys.stderr.isatty()
    if items and not shown:
        print(f"kvq: {message}, {len(items)} ...", file=sys.stderr, flush=True)
    yield from tqdm(items, desc=f"kvq: {message}", leave=False, disable=not items or not shown)
