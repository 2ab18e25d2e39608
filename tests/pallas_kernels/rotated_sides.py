"""Sides of keys before RoPE, over any other side."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.readers.rotary import RotatedReader
from tests.float64 import rotated
from tests.pallas_kernels.codebook_sides import FACTOR, SINK
from tests.pallas_kernels.harness import Shape, StoredSide


def before_rope(side: Callable[[Shape, int], StoredSide]) -> Callable[[Shape, int], StoredSide]:
    """Return what makes sides whose rows are those of another, rotated to their positions."""

    def turned(shape: Shape, seed: int) -> StoredSide:
        stored, half = side(shape, seed), shape[3] // 2
        frequencies = (100.0 ** (-np.arange(half) / half)).astype(np.float32)
        more = [frequencies, np.float32(FACTOR)]

        def at(rows: np.ndarray, moved: int = 0) -> np.ndarray:
            positions = SINK + moved + np.arange(shape[2])
            return rotated(rows, positions[:, None] * frequencies.astype(np.float64), FACTOR)

        def misread() -> dict[str, np.ndarray]:
            wrong = {name: at(rows) for name, rows in stored.misread().items()}
            further = {f"{moved} positions further": at(stored.rows, moved) for moved in (1, 32)}
            return wrong | further | {"without a rotation": stored.rows}

        def spoiled(limits: Sequence[int], garbage: Any) -> Sequence[Any]:
            return [*stored.spoiled(limits, garbage), *more]

        return dataclasses.replace(
            stored,
            reader=RotatedReader(stored.reader, sink=SINK),
            arrays=[*stored.arrays, *more],
            rows=at(stored.rows),
            misread=misread,
            spoiled=spoiled,
        )

    return turned
