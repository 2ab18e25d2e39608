"""Variants of a model with the same exact outputs, on which papers' tables can run as well."""

from __future__ import annotations

import functools

from laboratory.stress import Outliers, Stress, stressed

# no power of two: scales would take that up, and codes stay as they are
OUTLIERS = Outliers(channels=4, factor=12)
STRESSES = {
    "key outliers": Stress(key_outliers=OUTLIERS),
    "value outliers": Stress(value_outliers=OUTLIERS),
}
VARIANTS = {name: functools.partial(stressed, stress=stress) for name, stress in STRESSES.items()}
WORDS = {
    "key outliers": f"{OUTLIERS.channels} RoPE pairs of each head's keys times {OUTLIERS.factor:g}",
    "value outliers": (
        f"{OUTLIERS.channels} channels of each head's values times {OUTLIERS.factor:g}"
    ),
}
