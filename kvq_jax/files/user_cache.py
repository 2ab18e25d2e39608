"""The user's folder in which kvq keeps what it can compute or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $KVQ_CACHE, else kvq in $XDG_CACHE_HOME, else ~/.cache/kvq. It need not exist."""
    if folder := os.environ.get("KVQ_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvq"
