"""Suggest the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with the nearest known name, or "" if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
