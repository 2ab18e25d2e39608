"""All suites by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.quality.comparison import Suite
from benchmarks.quality.tables.anchors import anchors, squat_baselines
from benchmarks.quality.tables.equal_bits import equal_bits
from benchmarks.quality.tables.innerq import innerq
from benchmarks.quality.tables.kvquant import kvquant
from benchmarks.quality.tables.polarquant import polarquant
from benchmarks.quality.tables.squat import squat, squat_kivi
from benchmarks.quality.tables.squat_polarquant import squat_polarquant, squat_queries
from benchmarks.quality.tables.waterfill import waterfill
from benchmarks.quality.tables.xquant import xquant

SUITES: dict[str, Callable[[], Suite]] = {
    "innerq": innerq,
    "kvquant": kvquant,
    "squat": squat,
    "squat_kivi": squat_kivi,
    "polarquant": polarquant,
    "xquant": lambda: xquant("Quality of XQuant, KV heads shared", "4:4 3:3 2:2", (3,)),
    "xquant_mha": lambda: xquant("Quality of XQuant, a KV head for each query head", "8:4 4:2 3:2 2:2", (1, 2)),
    "squat_polarquant": squat_polarquant,
    "squat_queries": squat_queries,
    "equal_bits": equal_bits,
    "waterfill": waterfill,
    "squat_baselines": squat_baselines,
    "anchors": anchors,
}
