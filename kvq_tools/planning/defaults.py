"""The method of plans, and the texts and widths on which they measure."""

from __future__ import annotations

from kvq_tools.evaluation.defaults import STEP

METHOD = "waterfill"
BASES = ("pairs", "eigen")  # of keys, as waterfill's `key_basis` names them
MEASURED = (1.5, 2.5, 4.0)  # stored bits at which every side is measured
SCORED = 4 * STEP  # tokens of a window after the prompt
WINDOW, WINDOWS = 512 + SCORED, 2
SAMPLES, LENGTH = 2, 1024  # of the calibration


def method_with(basis: str) -> str:
    """Return the method of plans with this basis of keys, as a spec's text."""
    return f"{METHOD}:key_basis={basis}"
