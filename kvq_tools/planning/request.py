"""The texts of `kvq plan --text`, and the windows that it measures on.

the text, first half      waterfill is calibrated on it
the text, second half     windows of sides, of scales, and to check caches on, in turns
the other text            windows of scales and to check caches on, in turns
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

import kvq_jax as kvq
from kvq_jax.types.array_types import ModelDims
from kvq_tools.planning.defaults import METHOD, SCORED

Windows = Int[np.ndarray, "B T"]
CHECKED = 4  # times as many windows of each text as sides are measured on
SCALING: tuple[str, str, str] = "windows of sides", "the text", "the other text"
HELD_OUT: tuple[str, str] = "held-out windows of the text", "held-out windows of the other text"


class PlanRequest(NamedTuple):
    """The data of the measurements: token ids of the text and of a text of another kind, windows of
    `window` tokens, and samples of a calibration."""

    ids: Int[np.ndarray, " n"]
    other: Int[np.ndarray, " m"]
    window: int
    windows: int
    samples: int
    length: int

    @property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens to calibrate on and the tokens to measure on."""
        middle = len(self.ids) // 2
        return self.ids[:middle], self.ids[middle:]

    def of(self, name: str) -> Windows:
        """Return the windows of a name of SCALING or HELD_OUT."""
        text = self._spread(self.halves[1], 1 + 2 * CHECKED)
        sides = np.arange(len(text)) % (1 + 2 * CHECKED) == 0
        text, other = text[~sides], self._spread(self.other, 2 * CHECKED)
        every = self.rows, text[::2], other[::2], text[1::2], other[1::2]
        return dict(zip((*SCALING, *HELD_OUT), every, strict=True))[name]

    @property
    def rows(self) -> Windows:
        """Return the windows on which sides are measured."""
        return self._spread(self.halves[1], 1 + 2 * CHECKED)[:: 1 + 2 * CHECKED]

    def _spread(self, ids: np.ndarray, times: int) -> Windows:
        """Return `times` as many windows as sides are measured on, evenly over the tokens."""
        starts = np.linspace(0, len(ids) - self.window, times * self.windows).astype(int)
        return np.stack([ids[start : start + self.window] for start in starts]).astype(np.int32)

    @property
    def prompt(self) -> int:
        return self.window - SCORED

    def check(self, config: ModelDims) -> None:
        """Raise ValueError, in one line, if the texts or the sizes do not allow the
        measurements."""
        plans = kvq.cache.layout(METHOD, config, 1, self.window).plans
        regions = [plan.regions for plan in plans]
        least = max(one.sink + one.recent + one.block for one in regions)
        if self.prompt < least:
            raise ValueError(
                f"windows of {self.window} tokens leave nothing to quantize: give at least"
                f" {least + SCORED}"
            )
        fewer = "--windows and --window make them fewer or shorter"
        count = (1 + 2 * CHECKED) * self.windows
        needed = 2 * max(count * self.window, self.length + 1)
        if len(self.ids) < needed:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, and a plan needs at least {needed}: half to"
                f" calibrate on, half for {count} windows of {self.window}; {fewer}"
            )
        count = 2 * CHECKED * self.windows
        if len(self.other) < count * self.window:
            raise ValueError(
                f"--check-text has {len(self.other)} tokens, and {count} windows of {self.window}"
                f" need {count * self.window}; {fewer}"
            )
