"""The file of answers of `kvq generate --prompts`, one on each line, which a run continues."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

from kvq_jax.files.json_text import parse_json
from kvq_tools.cli import console

_ID = re.compile(rb'\{"id": (-?\d+|"([^"\\]|\\.)*"?)')


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str | int, str], BinaryIO]]:
    """Yield (the keys of the answers that a file has, by id; the file, open after them).

    Raises UserError if the file does not hold answers, or if another process writes to it.
    """
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        with console.input_errors():
            try:
                stack.enter_context(filelock.FileLock(lock, timeout=0))
            except filelock.Timeout:
                raise console.UserError(f"another process writes to {str(path)!r}") from None
            stack.callback(lock.unlink, missing_ok=True)
            file = stack.enter_context(open(path, "a+b"))
            keys = _keys(path, file)
        yield keys, file


def _keys(path: Path, file: BinaryIO) -> dict[str | int, str]:
    """Return the keys of a file's answers by id, and move to the end of the last whole one."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    keys: dict[str | int, str] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            answer = parse_json(line)
            keys[answer["id"]] = answer["key"]
        except (ValueError, KeyError, TypeError):
            raise console.UserError(
                f"{str(path)!r}, line {number}, is not an answer of kvq generate; name another file"
            ) from None
    if not _begins_as_answer(content[len(whole) :]):
        raise console.UserError(
            f"the last line of {str(path)!r} is not an answer of kvq generate; name another file"
        )
    file.seek(len(whole))
    return keys


def _begins_as_answer(line: bytes) -> bool:
    """Return True if a line that was cut begins as `kvq generate` begins one, as far as it goes."""
    if not (until_id := _ID.match(line)):
        return b'{"id": '.startswith(line)
    rest, key = line[until_id.end() :], b', "key": "'
    return rest.startswith(key) or key.startswith(rest)
