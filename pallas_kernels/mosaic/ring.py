"""Rows of a unit of tokens that leave their ring, on Mosaic GPU."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.registers import LANES
from pallas_kernels.mosaic.rows import Rows


class RingRows(NamedTuple):
    """The rows of a unit of one head.

    Args:
        ref: the ring, [R, H].
        slot: of the unit's first token.
        new: the slot of the new token, or None if no unit holds it.
        new_row: [1, H]. Another program writes it into the ring at the same time, so it is read
            from its source.
    """

    ref: Any
    slot: Any
    new: Any
    new_row: Any

    def load(self, rows: Rows, first: Any, count: int, columns: Any) -> jax.Array:
        """Load `count` rows for each warp, from token `first` of the unit on, in their own
        dtype."""
        new_row, slots = self.new_row.at[:, columns], self.ref.shape[0]
        once = Rows(rows.interpret, 0, rows.parts)
        if self.new is not None and slots == 1:
            return once.load(new_row, count)
        start = self.slot + first
        start = jnp.where(start < slots, start, start - slots)
        x = rows.load(self.ref.at[:, columns], count, self.new, start)
        if self.new is None:
            return x
        warp, row = (plgpu.broadcasted_iota(jnp.int32, x.shape, i, layout=LANES) for i in range(2))
        slot = start + rows.stride * warp + row
        slot = jnp.where(slot < slots, slot, slot - slots)
        return jnp.where(slot == self.new, once.load(new_row, count), x)
