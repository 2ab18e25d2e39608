"""Read keys before RoPE in an eigenbasis, in runs of channels of one width each: `waterfill` with
`key_basis=eigen`.

    k^ = g_t sum_c x_tc step_c a_c + mu        a: rows of A^-1
    scores    q . R(p) k^ = g_t (x_t step A^-1) . R(-p) q + mu . R(-p) q

A product of matrices makes each key of its channels before it is rotated: H multiplications for
each number. Rotated rows have the two channels of a RoPE pair side by side, as in runs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Int

from pallas_kernels.angles import cos_and_sin
from pallas_kernels.readers.base import SlotRows
from pallas_kernels.readers.run_chunks import WIDTH
from pallas_kernels.readers.runs import RunsKeys
from pallas_kernels.tiles.tile import Tile


@dataclasses.dataclass(frozen=True)
class EigenKeys(RunsKeys):
    """Keys before RoPE in an eigenbasis. Kernels on Mosaic GPU read them.

    Stored arrays, after the steps: A^-1 [K, H, H] (multiplied by rows from the left) and mu [K, H];
    inverse frequencies [H/2] and RoPE's attention factor [], fp32. Token t is at position sink + t.
    """

    @property
    def off_triton(self) -> str:
        return "Triton's kernels do not turn keys back from an eigenbasis before they rotate them"

    @property
    def _in_pairs(self) -> np.ndarray:
        """Return the channel in each lane of rotated rows."""
        return np.arange(self.channels).reshape(2, -1).T.reshape(-1)

    def matrix(self, stored: Sequence[Array]) -> Float16[Array, "K C H"]:
        """Return step A^-1 from the lanes of stored chunks to those of rotated rows."""
        synthesis = stored[self.words_count + 2][:, : self.stored]
        rows = self._steps(stored)[None, :, None] * synthesis[:, :, self._in_pairs]
        rows = jnp.pad(rows, ((0, 0), (0, self.channels - self.stored), (0, 0)))
        lanes = jnp.take(rows, self._order, axis=1)
        return lanes[:, : WIDTH * len(self.pieces)].astype(jnp.float16)

    def row_tables(
        self, stored: Sequence[Array], distances: Int[Array, " n"]
    ) -> list[Float16[Array, "K n H"]]:
        """Return cosines and sines of distances, and the means times them."""
        mean = stored[self.words_count + 3][:, None, self._in_pairs]
        cos, sin = self.angles(stored, distances)
        return [(a * table).astype(jnp.float16) for a in (1, mean) for table in (cos, sin)]

    def ordered(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> Array:
        """Return the queries in the order of rotated rows, times RoPE's attention factor."""
        return q[..., self._in_pairs] * stored[-1]

    def angles(
        self, stored: Sequence[Array], positions: Int[Array, " n"]
    ) -> tuple[Float[Array, "K n H"], Float[Array, "K n H"]]:
        """Return the cosines and sines of position * frequency, in the order of rotated rows."""
        heads = stored[self.words_count + 2].shape[0]
        tables = cos_and_sin(positions, stored[-2])
        cos, sin = (jnp.repeat(table, 2, axis=1)[None].repeat(heads, 0) for table in tables)
        return cos, sin

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        raise NotImplementedError(self.off_triton)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        raise NotImplementedError(self.off_triton)
