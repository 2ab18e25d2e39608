"""The JSON file of a benchmark: a header, which says what was run, when and on what, and the rows
that were measured.

A benchmark derives its report from `Report` and adds its fields: numbers, strings, dataclasses, and
tuples, lists and dicts of them. Files are read by the types of the fields. Fields that a file lacks
take their defaults, and what a file lists under "derived" is left out: it follows from the rest and
is there for readers of the file.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, Self, TypedDict

import jax

from kvq_jax.files import whole

DERIVED = "derived"
RESULTS = pathlib.Path(__file__).parent / "results"  # the committed reports and their pages


def _commit() -> str:
    command = ("git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+")
    try:
        return subprocess.run(
            command, cwd=RESULTS, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def clean(commit: str) -> bool:
    """Return True if this names a commit, without changes on top of it."""
    return re.fullmatch("[0-9a-f]{7,40}", commit) is not None


COMMIT = _commit()  # of the sources as they are when they are read, not when a report is written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The header of every report.

    device, python_version, commit: "" in files that are older than these fields.
    commit: of the project's sources, with "+" if files differed from it, or "" outside a
        repository.
    """

    title: str = ""
    command: str
    date: str
    device: str = ""
    jax_version: str
    python_version: str = ""
    commit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file. Reports that list derived numbers add them here."""
        return dataclasses.asdict(self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Warns of numbers that no clean commit measured."""
        if not clean(self.commit):
            _warn(self.commit)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        whole.write(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that this class wrote. Raises TypeError if the fields differ from the
        class's."""
        return from_json(cls, json.loads(pathlib.Path(path).read_text(encoding="utf-8")))


class Header(TypedDict):
    """The fields of `Report` that follow from the process."""

    command: str
    date: str
    device: str
    jax_version: str
    python_version: str
    commit: str


def header(command: Sequence[str]) -> Header:
    """Return the header's fields for this process. `command` is the part after `python -m`; an
    absolute path in it is cut to its last part."""
    words = (pathlib.Path(word).name if word.startswith("/") else word for word in command)
    return {
        "command": " ".join(["python -m", *words]),
        "date": now(),
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
        "python_version": platform.python_version(),
        "commit": COMMIT,
    }


@functools.cache
def _warn(commit: str) -> None:
    state = (
        f"commit {commit.removesuffix('+')} with changes on top of it" if commit else "no commit"
    )
    print(
        f"WARNING: these numbers are of {state}: a test refuses their page among the results;"
        " commit the changes, and measure again.",
        file=sys.stderr,
        flush=True,
    )


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def arguments(argv: Sequence[str] | None) -> Sequence[str]:
    """Return the command's arguments as `main(argv)` takes them."""
    return sys.argv[1:] if argv is None else argv


_kinds = functools.cache(typing.get_type_hints)


def from_json(kind: Any, value: Any) -> Any:
    """Build a value of an annotated type (a report, a row) from what JSON made of it. Raises
    TypeError if the fields differ."""
    if dataclasses.is_dataclass(kind):
        kinds = _kinds(kind)
        return typing.cast(Any, kind)(
            **{
                name: from_json(kinds.get(name), field)
                for name, field in value.items()
                if name != DERIVED
            }
        )
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, list):
        return origin(from_json(parts[0], item) for item in value)
    if origin is dict:
        return {name: from_json(parts[1], item) for name, item in value.items()}
    if origin in (types.UnionType, typing.Union) and value is not None:
        return from_json(next(part for part in parts if part is not type(None)), value)
    return value
