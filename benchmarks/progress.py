"""Lines about the progress of a run."""

from __future__ import annotations

import sys


def progress(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
