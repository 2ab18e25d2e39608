"""Memory of this process at this moment, as Linux reports it."""

from __future__ import annotations

import pathlib
import resource


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if the system does not say."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
