"""Talk to the user: one-line errors, JSON and progress. Results go to stdout, everything else to
stderr."""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvq_tools.cli import interruption

ERASED = "\x1b[K"  # clears a terminal's line from the cursor on
PIPED_BAR_SECONDS = 60  # between lines about a long loop if stderr is not a terminal
PIPED_SECONDS = 5  # between lines about a long prompt if stderr is not a terminal
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # why a file cannot grow
# one number for all formats; goes up if a key is renamed, removed or gets a new meaning
JSON_VERSION = 1

T = TypeVar("T")

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONG_NUMBER = re.compile(r"(\d{20})\d{20,}")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def printable(text: str) -> str:
    """Escape what a terminal must not receive, as in \\x1b.

    Control characters (except newline and tab), lone surrogates and marks that change the direction
    of writing are escaped. Text from a model or a checkpoint always passes through here: it could
    set the terminal's title, move the cursor or hide text.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """An error that the user can fix. Its text is one line, without the further digits of a long
    number. `main` prints it and exits with 2."""

    def __init__(self, message: object):
        line = " ".join(str(message).split())
        super().__init__(printable(_LONG_NUMBER.sub(r"\1...", line)))


class NotFiniteError(Exception):
    """The printed results mean nothing because the model computed nan or inf. `main` exits with
    3."""


class OutputError(Exception):
    """stdout cannot be written. `main` prints the reason and exits with 1."""


class CheckedOutput:
    """A text stream whose failures to write are OutputError, not any OSError of the command."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._checked(self._stream.write, text)

    def flush(self) -> None:
        self._checked(self._stream.flush)

    def _checked(self, function: Callable[..., Any], *arguments: str) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            raise OutputError(f"stdout cannot be written: {error.strerror}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Messages(CheckedOutput):
    """stderr for a command that does not fail with it. What cannot be written is lost, and all that
    follows: the terminal was closed, or the log's disk is full."""

    def _checked(self, function: Callable[..., Any], *arguments: str) -> Any:
        try:
            return function(*arguments)
        except OSError:
            discard(self._stream)


def discard(stream: Any) -> None:
    """Send a process's stream that cannot be written to os.devnull, or Python would complain of it
    at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn errors into UserError while user input is read and checked, and files are written.
    Elsewhere the same exceptions are bugs and keep their traceback. A full disk is not the user's
    input: `main` reports it."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        named = error.filename is not None and error.strerror
        raise UserError(f"{error.filename!r}: {named}" if named else error) from error
    except (ValueError, NotImplementedError) as error:
        raise UserError(error) from error


def check_finite(names: Sequence[str]) -> None:
    """Raise NotFiniteError if any cache is named, each one having made the model compute nan or
    inf."""
    if names:
        raise NotFiniteError(
            "the model computed numbers that are not finite (nan or inf) with"
            f" {', '.join(dict.fromkeys(names))}"
        )


def note(message: str) -> None:
    """Print a line on stderr."""
    print(f"kvq: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    note(f"warning: {printable(message)}")


def print_json(kind: str, result: dict[str, Any]) -> None:
    """Print a result as one JSON object that names its format. docs/json.md describes the
    formats."""
    text = json_object(kind, result)
    interruption.promise_json(None)
    print(text, flush=True)  # whoever starts `kvq serve` waits for this at the end of a pipe


def json_object(kind: str, result: dict[str, Any]) -> str:
    """Return the text of such an object, in ASCII if stdout is not UTF-8, which JSON has to be."""
    named = {"format": f"kvq.{kind}", "version": JSON_VERSION}
    in_ascii = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
    text = json.dumps(named | result, indent=2, ensure_ascii=in_ascii, allow_nan=False)
    # json itself escapes those below 32
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def format_bytes(size: int) -> str:
    """Return a size with its unit: 1536 is 1.50 KiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{size} B"


def counted(number: int, things: str) -> str:
    """Return a number of things in words: "2 tokens", and "1 token"."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Show that a model is loaded, as one line on stderr. A terminal's line makes room for the bar
    of `load_llama`, which appears after a second, and is erased at the end."""
    line = printable(f"kvq: loading {model} ...")
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        yield
        return
    width = shutil.get_terminal_size().columns
    print(line[: width - 1], end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{ERASED}", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(
    message: str, tokens: int | None = None, share: Callable[[], float] | None = None
) -> Iterator[None]:
    """Show a message on stderr: with the seconds so far in a terminal, as a line elsewhere.

    Nothing else may show progress in the meantime. With `tokens`, the number of tokens that are
    read at once, the speed is shown at the end, and before it a line every few seconds if stderr is
    no terminal. `share` returns the fraction of them that is read so far, or 0 if it is unknown.
    """
    message = printable(message) + ("" if tokens is None else f", {counted(tokens, 'tokens')}")
    started, done, terminal = time.perf_counter(), threading.Event(), sys.stderr.isatty()
    line = None
    if terminal:
        line = _bar(desc=f"kvq: {message}", bar_format="{desc} ... {elapsed}")
    else:
        note(f"{message} ...")

    def tick() -> None:
        while not done.wait(1 if terminal else PIPED_SECONDS):
            seconds, part = time.perf_counter() - started, min(share() if share else 0.0, 1.0)
            so_far = ""
            if part and tokens is not None:
                so_far = f" ... {part:.0%}, {tokens * part / seconds:.0f} tokens/s"
            if line is not None:
                line.set_description_str(f"kvq: {message}{so_far}")
            elif tokens is not None:
                note(f"{message}{so_far} ... {seconds:.0f} s")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
        if line is not None:
            line.close()
    seconds = time.perf_counter() - started
    if tokens is not None and seconds > PIPED_SECONDS:
        note(f"{tokens} tokens read in {seconds:.0f} s, {tokens / seconds:.0f} tokens/s")


def bar(items: Sequence[T], message: str) -> Iterator[T]:
    """Yield the items of a long loop. Show a bar on stderr in a terminal, a line at the start and
    every minute elsewhere, or nothing if there are no items."""
    if items and sys.stderr.isatty():
        yield from _bar(items, desc=f"kvq: {message}")
        return
    if items:
        note(f"{message}, {len(items)} ...")
    told = time.monotonic()
    for done, item in enumerate(items):
        if done and time.monotonic() - told >= PIPED_BAR_SECONDS:
            note(f"{message}: {done}/{len(items)} ...")
            told = time.monotonic()
        yield item


def _bar(*items: Any, **options: Any) -> Any:
    from tqdm import tqdm  # imported late: a pipe sees no bar

    return tqdm(*items, leave=False, **options)


@contextmanager
def byte_bar(message: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function `update(done, total)` that shows progress in bytes on stderr: a bar in a
    terminal, one line elsewhere. Nothing is shown before its first call."""
    shown: list[Any] = []

    def update(done: int, total: int) -> None:
        if not shown:
            terminal = sys.stderr.isatty()
            if not terminal:
                note(f"{message} ...")
            text, unit = f"kvq: {message}", {"unit": "B", "unit_scale": True}
            shown.append(_bar(desc=text, total=total, initial=done, disable=not terminal, **unit))
        shown[0].update(done - shown[0].n)

    try:
        yield update
    finally:
        for bar in shown:
            bar.close()
