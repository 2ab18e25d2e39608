"""The texts of `kvq plan --text`, and the windows that it measures on.

waterfill is calibrated on the first half of the text. Its second half, and the other text, have
windows of three kinds, in turns: those on which sides are measured, those by which sums of sides
are scaled, and those on which whole caches are checked, which nothing else has seen. The last are
longer if the text and the context allow, so that caches which differ in their exact windows can be
told apart.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

import kvq_jax as kvq
from kvq_jax.types.array_types import ModelDims
from kvq_tools.evaluation.windows import opened
from kvq_tools.planning.defaults import LONGER, METHOD, RECENTS, SCORED

Kind = Literal["sides", "scale", "check"]
SCALING: tuple[Kind, Kind] = "sides", "scale"
TEXTS = range(2)  # the text and the other one
WHOLE = 4  # times as many windows for whole caches, of either kind, as for sides


class PlanRequest(NamedTuple):
    """The data of the measurements: token ids of the text and of a text of another kind, windows of
    `window` tokens, those of whole caches of up to `longest`, samples of a calibration, and the
    model's token that opens texts."""

    ids: Int[np.ndarray, " n"]
    other: Int[np.ndarray, " m"]
    window: int
    longest: int
    windows: int
    samples: int
    length: int
    bos: int | None = None

    @property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens to calibrate on and the tokens to measure on."""
        middle = len(self.ids) // 2
        return self.ids[:middle], self.ids[middle:]

    def rows(self, text: int, kind: Kind) -> Int[np.ndarray, "B T"]:
        """Return the windows of a kind, spread evenly over a text."""
        ids = self._texts[text]
        ends = np.linspace(self.window, len(ids), self._count).astype(int)
        sides = np.arange(self._count) % (1 + 2 * WHOLE) == 0
        whole = ends[~sides]
        ends = {"sides": ends[sides], "scale": whole[::2], "check": whole[1::2]}[kind]
        width = self.checked if kind == "check" else self.window
        rows = np.stack([ids[end - width : end] for end in ends]).astype(np.int32)
        return opened(rows, self.ids, self.bos)

    @property
    def _texts(self) -> tuple[np.ndarray, np.ndarray]:
        return self.halves[1], self.other

    @property
    def checked(self) -> int:
        """Return the tokens of a window on which whole caches are checked: `longest`, or fewer if
        another window has them."""
        between = min((len(ids) - self.window) // (self._count - 1) for ids in self._texts)
        return max(self.window, min(self.longest, between))

    @property
    def recents(self) -> tuple[int, ...]:
        """Return those of RECENTS that such windows can tell apart."""
        return tuple(recent for recent in RECENTS if LONGER * recent <= self.checked - SCORED)

    @property
    def _count(self) -> int:
        return (1 + 2 * WHOLE) * self.windows

    @property
    def prompt(self) -> int:
        return self.window - SCORED

    def check(self, config: ModelDims) -> None:
        """Raise ValueError, in one line, if the texts or the sizes do not allow the
        measurements."""
        plans = kvq.cache.layout(METHOD, config, 1, self.window).plans
        regions = [plan.regions for plan in plans]
        minimum = max(one.sink + one.recent + one.block for one in regions)
        if self.windows and self.prompt < minimum:
            raise ValueError(
                f"windows of {self.window} tokens leave nothing to quantize: give at least"
                f" {minimum + SCORED}"
            )
        windows = f"{self._count} windows of {self.window}"
        fewer = "--windows and --window make them fewer or shorter"
        needed = 2 * max(self._count * self.window, self.length + 1)
        if len(self.ids) < needed:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, and a plan needs at least {needed}: half to"
                f" calibrate on, half for {windows}; {fewer}"
            )
        if len(self.other) < self._count * self.window:
            raise ValueError(
                f"--other-text has {len(self.other)} tokens, and {windows} need"
                f" {self._count * self.window}; {fewer}"
            )
