"""Numbers for JSON, which has no inf and no nan."""

from __future__ import annotations

import math


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None
