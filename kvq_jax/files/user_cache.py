"""The folder of this user in which kvq keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $KVQ_CACHE, else kvq in $XDG_CACHE_HOME, else ~/.cache/kvq. It need not exist."""
    if own := os.environ.get("KVQ_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvq"
