"""The settings of a report that nobody chose."""

from __future__ import annotations

STEPS = 15  # timed, after one that is not timed
SAMPLE = 128  # tokens whose magnitudes and errors are shown
