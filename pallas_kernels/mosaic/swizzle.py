"""Rows in shared memory that the copy engine has swizzled.

`ldmatrix` reads 16 bytes of each of eight rows at a time. If rows lie one after the other, 32, 64
or 128 bytes and more apart, these parts share banks, and are read in two, four or eight turns. The
copy engine can exchange parts while it writes them: in row r, part p of a row of 128 bytes goes to
place p ^ r % 8, of 64 bytes to p ^ r / 2 % 4, of 32 bytes to p ^ r / 4 % 2. So the eight parts have
all banks (registers.exchanged). Longer rows are cut into tiles of eight rows of 128 bytes.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.registers import SIDE

_WIDEST = 128  # bytes
_BYTES = 2  # of a number


def transforms_of(columns: int) -> tuple[Any, ...]:
    """Return how the copy engine writes rows of `columns` 16-bit numbers."""
    width = min(_BYTES * columns, _WIDEST)
    tiling = plgpu.TilingTransform((SIDE, width // _BYTES))
    return (*[tiling] * (width < _BYTES * columns), plgpu.SwizzleTransform(width))
