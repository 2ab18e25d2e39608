"""Suggest the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with the one known name that begins so, else with the nearest
    one, or "" if none is near."""
    names = list(known)
    begun = [one for one in names if name and one.startswith(name.lower())]
    near = begun if len(begun) == 1 else difflib.get_close_matches(name.lower(), names, n=1)
    return f" Did you mean {near[0]}?" if near else ""
