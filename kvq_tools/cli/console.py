"""Talk to the user: errors of one line, JSON, progress. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

JSON_VERSION = 1  # of every format: counts up where a key changes its name or meaning, or goes

T = TypeVar("T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class UserError(Exception):
    """An error that the user can put right. Its text is one line; `main` prints it and exits with 2."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn errors into UserError while the user's input is read and checked; elsewhere the same exceptions are bugs with a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(error) from error


def warn(message: str) -> None:
    print(f"kvq: warning: {message}", file=sys.stderr)


def print_json(kind: str, result: dict[str, Any]) -> None:
    """Print a result as one JSON object that names its format; docs/json.md describes each."""
    named = {"format": f"kvq.{kind}", "version": JSON_VERSION}
    print(json.dumps(named | result, indent=2, ensure_ascii=False, allow_nan=False))


def format_bytes(size: int) -> str:
    """Return a size with its unit: 1536 is 1.50 KiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{size} B"


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Show the message on stderr: beside a spinner in a terminal, as a line elsewhere."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(Text(message)):
            yield
    else:
        console.print(Text(f"kvq: {message} ..."), soft_wrap=True)
        yield


def bar(items: Sequence[T], message: str) -> Iterator[T]:
    """Yield the items of a long loop, with a bar on stderr in a terminal and a line elsewhere; neither where there are no items."""
    shown = sys.stderr.isatty()
    if items and not shown:
        print(f"kvq: {message}, {len(items)} ...", file=sys.stderr, flush=True)
    yield from tqdm(items, desc=f"kvq: {message}", leave=False, disable=not items or not shown)


@contextmanager
def byte_bar(message: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many bytes of how many are done: in a bar on stderr in a terminal, as one line elsewhere.

    Nothing is shown before its first call.
    """
    shown: list[tqdm] = []

    def update(done: int, total: int) -> None:
        if not shown:
            terminal = sys.stderr.isatty()
            if not terminal:
                print(f"kvq: {message} ...", file=sys.stderr, flush=True)
            text = f"kvq: {message}"
            shown.append(tqdm(desc=text, total=total, initial=done, unit="B", unit_scale=True, leave=False, disable=not terminal))
        shown[0].update(done - shown[0].n)

    try:
        yield update
    finally:
        for bar in shown:
            bar.close()
