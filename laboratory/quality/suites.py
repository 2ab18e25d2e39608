"""The suites by name: the papers' tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from laboratory.quality.comparison import Suite
from laboratory.quality.tables.innerq import innerq
from laboratory.quality.tables.kvquant import kvquant
from laboratory.quality.tables.polarquant import polarquant
from laboratory.quality.tables.squat import squat
from laboratory.quality.tables.squat_baselines import squat_baselines
from laboratory.quality.tables.xquant import xquant
from laboratory.quality.variants import VARIANTS


def _with_variants(suite: Callable[[], Suite]) -> Callable[[], Suite]:
    return lambda: dataclasses.replace(suite(), variants=VARIANTS)


SUITES = {
    suite.__name__: _with_variants(suite)
    for suite in (innerq, kvquant, squat, polarquant, xquant, squat_baselines)
}
