"""All suites by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.quality.comparison import Suite
from benchmarks.quality.tables.anchors import anchors, squat_baselines
from benchmarks.quality.tables.equal_bits import equal_bits
from benchmarks.quality.tables.innerq import innerq
from benchmarks.quality.tables.kvquant import kvquant
from benchmarks.quality.tables.polarquant import polarquant
from benchmarks.quality.tables.squat import squat
from benchmarks.quality.tables.waterfill import plans, waterfill
from benchmarks.quality.tables.xquant import xquant

SUITES: dict[str, Callable[[], Suite]] = {
    "innerq": innerq,
    "kvquant": kvquant,
    "squat": squat,
    "polarquant": polarquant,
    "xquant": xquant,
    "equal_bits": equal_bits,
    "waterfill": waterfill,
    "plans": plans,
    "squat_baselines": squat_baselines,
    "anchors": anchors,
}
