"""The user's folder in which kvq keeps what it can compute or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $KVQ_CACHE, else kvq in $XDG_CACHE_HOME, else ~/.cache/kvq. It need not exist, and
    cannot be made for a user without a home, such as a number that a container runs as."""
    folder = os.environ.get("KVQ_CACHE")
    path = Path(folder or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        path = path.expanduser()
    except RuntimeError:
        path = Path("/nonexistent") / path.relative_to(path.parts[0])
    return path if folder else path / "kvq"
