"""The protocol of what quantizes a block that leaves its ring, inside of the kernel that appends a
token (append.py).

A block is cut into units of neighbouring tokens, and a unit is the work of one program or of
several.

This module imports no Triton, so that code that only asks for a writer's type does not import the
kernels.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float


class BlockWriter(abc.ABC):
    """Quantizes blocks of one side. Static and hashable; its refs of arrays have one axis less than
    the arrays, the batch's."""

    @property
    @abc.abstractmethod
    def unit(self) -> int:
        """Return the tokens of a unit. A block is whole units."""

    @property
    def run(self) -> int:
        """Return the tokens that must lie in the ring without a gap, a divisor of the unit: the
        ring is whole runs."""
        return self.unit

    @property
    def programs(self) -> int:
        """Return the programs of a unit, for each head."""
        return 1

    @property
    def warps(self) -> int:
        """Return the warps that a program should have at least."""
        return 1

    @abc.abstractmethod
    def check(self, ring: Float[Array, "B K R H"], block: int) -> None:
        """Raise ValueError, in one line, where blocks of such rows cannot be quantized."""

    @abc.abstractmethod
    def write(
        self,
        program: Any,
        head: Any,
        source: Any,
        place: Any,
        inputs: Sequence[Any],
        arrays: Sequence[Any],
    ) -> None:
        """Quantize one head of a unit, as the `program`-th of its programs.

        source: the rows (blocks.Source). place: the unit's first token among those of `arrays`, the
        body's. inputs: arrays that are only read."""
