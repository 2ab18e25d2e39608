"""Read full-precision rows as they are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.readers.base import LoopStep, Reader, SlotRows
from pallas_kernels.readers.shared import LOG2E, dot
from pallas_kernels.tiles.tile import Tile


@dataclasses.dataclass(frozen=True)
class DenseReader(Reader):
    """Full-precision rows: [B, K, S, H] in bfloat16 or float16, or uint16 that holds the bits."""

    channels: int
    dtype: str

    @property
    def slots(self) -> int:
        return 1

    @property
    def chunks(self) -> tuple[int, int]:
        return 1, self.channels

    @property
    def row_bytes(self) -> int:
        return 2 * self.channels

    @property
    def step(self) -> LoopStep:
        return LoopStep(8192 // self.channels)

    @property
    def packed(self) -> bool:
        return False

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(stored)

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        return (q.astype(self.dtype),)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        return [
            dot(self._rows(refs[0], tile), query[0][...], (1, 1)) * (LOG2E * self.channels**-0.5)
        ]

    def weigh(
        self, weights: SlotRows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool
    ) -> list[Array]:
        return [sums[0] + dot(self._rows(refs[0], tile), weights[0].astype(self.dtype), (0, 0))]

    def _rows(self, ref: Any, tile: Tile) -> Float[Array, "tile H"]:
        rows = ref[pl.ds(tile.offset(1), tile.size), :]
        if rows.dtype == jnp.uint16:
            rows = lax.bitcast_convert_type(rows, jnp.dtype(self.dtype))
        if tile.masked:
            token = lax.broadcasted_iota(jnp.int32, (tile.size, 1), 0)
            rows = jnp.where(tile.counts(token), rows, 0)
        return rows
