"""Suggest the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_UNKNOWN = re.compile(r"unknown [\w ]*'(?P<name>[^']*)'[^;]*; \w+: (?P<known>.*)")


def hint(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with the nearest known name, or "" if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def with_hint(message: str) -> str:
    """Add the hint to an error such as "unknown option 'bit' of kivi; options: bits, recent"."""
    match = _UNKNOWN.match(message)
    if match is None:
        return message
    nearest = hint(match["name"], match["known"].split(", "))
    return f"{message}.{nearest}" if nearest else message
