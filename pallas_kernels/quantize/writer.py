"""The protocol of writers, which quantize a block that leaves its ring inside the kernel that
appends a token (append.py).

A block is cut into units of neighbouring tokens. One program or several do the work of a unit.

This module imports no Triton, so code that only needs the type of a writer does not import the
kernels.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float


class BlockWriter(abc.ABC):
    """Quantizes blocks of one side. Static and hashable. Its refs lack the batch axis of the
    arrays.
    """

    @property
    @abc.abstractmethod
    def unit(self) -> int:
        """Return the tokens of a unit. A block is whole units."""

    @property
    def run(self) -> int:
        """Return how many tokens must be contiguous in the ring, a divisor of the unit. The ring is
        whole runs.
        """
        return self.unit

    @property
    def programs(self) -> int:
        """Return the number of programs per unit and head."""
        return 1

    @property
    def warps(self) -> int:
        """Return the fewest warps that a program should have."""
        return 1

    @abc.abstractmethod
    def check(self, ring: Float[Array, "B K R H"], block: int) -> None:
        """Raise ValueError, in one line, if blocks of such rows cannot be quantized."""

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

        Args:
            program: its number within the unit.
            head: the KV head.
            source: the rows (blocks.Source).
            place: the unit's first token in `arrays`.
            inputs: refs of arrays that are only read.
            arrays: refs of the body's arrays.
        """
