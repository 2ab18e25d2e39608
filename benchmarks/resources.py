"""Memory of this process at this moment, as Linux reports it."""

from __future__ import annotations

import pathlib
import resource


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if the system does not say."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def mappings() -> int:
    """Return the number of memory mappings of this process, or 0 if the system does not say."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_text().count("\n") if maps.exists() else 0
