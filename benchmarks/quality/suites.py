"""All suites by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.quality.comparison import Suite
from benchmarks.quality.tables.equal_bits import equal_bits
from benchmarks.quality.tables.waterfill import plans, waterfill

SUITES: dict[str, Callable[[], Suite]] = {
    "equal_bits": equal_bits,
    "waterfill": waterfill,
    "plans": plans,
}
