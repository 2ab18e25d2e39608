"""Forget compiled programs before a process has as many memory mappings as Linux allows it: LLVM
crashes past that limit (65,530 by default), and each program takes dozens."""

from __future__ import annotations

import pathlib

import jax

LIMIT = pathlib.Path("/proc/sys/vm/max_map_count")
# share of the limit at which programs are forgotten: a cache whose layers differ adds thousands
# before anybody looks again
SHARE = 0.6


def mappings() -> int:
    """Return the number of memory mappings of this process, or 0 if the system does not say."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_text().count("\n") if maps.exists() else 0


def drop_if_many() -> bool:
    """Forget all compiled programs if they are many, and return whether they were. Those that are
    called again are compiled again."""
    if not LIMIT.exists() or mappings() < SHARE * int(LIMIT.read_text()):
        return False
    jax.clear_caches()
    return True
