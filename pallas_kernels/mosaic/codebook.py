"""Codes that index a table, as warps read them: entries straight from words into a tensor core's
operand (table_lookup.py).

    scores of a span             sum_g s_g (q_g . table[c]) + z_g sum(q_g)
    weighted values of a span    p . (table[c] s + z)

s and z belong to a token and a group of channels, so all but the look-up is as for uniform groups
of channels (grouped.py), without a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.tuning import target_capability
from pallas_kernels.mosaic.grouped import GroupedKeys, GroupedSide, GroupedValues
from pallas_kernels.mosaic.matrices import Matrices
from pallas_kernels.mosaic.registers import SIDE, WARPS
from pallas_kernels.mosaic.route import BULK
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.mosaic.table_lookup import entries, in_registers
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN


class CodebookSide(GroupedSide):
    """The stored arrays of one side, and their buffers in shared memory."""

    @classmethod
    def of(cls, reader: Any, span: int) -> Any:
        assert span == SPAN, "packed rows come in whole spans"
        return cls(GroupedReader(reader.layout, "channels", reader.group, None))

    @property
    def _sets(self) -> int:
        return len(self.layout.sets)

    def offset(self, slot: int, chunk: int) -> float:
        return 0.0

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return [stored[self._sets].astype(jnp.float32)]

    def table(self, refs: Sequence[Any], ops: Matrices) -> list[jax.Array]:
        [ref] = refs
        return in_registers([ref[i] for i in range(ref.shape[0])], ops.interpret)

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return super().views([*stored[: self._sets], *stored[self._sets + 1 :][:2]])

    def _numbers(self, words: Any, table: Any, axis: int, ops: Matrices) -> list[jax.Array]:
        return entries(words, self.layout, table, axis, ops.interpret)


class CodebookKeys(CodebookSide, GroupedKeys):
    """Scores of a stripe."""


class ChannelKeys(CodebookKeys):
    """Keys before RoPE with scales and zero points of channels, which come with each tile from one
    array for all tokens."""

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the views of the words, and those of scales and zero points, [1, K, 1, H]. Without
        a copy engine these are one array [1, K, n, H], in which they repeat, so that every thread
        of a block copies two of them (`route.min_tile`)."""
        pair = [s.astype(jnp.float16) for s in stored[self._sets + 1 :][:2]]
        views = [s[None, :, None] for s in pair]
        if float(target_capability()) < BULK:
            rows = pair * max(1, 32 * WARPS // self.layout.channels)
            views = [jnp.stack(rows, axis=1)[None]]
        return [*super().views(stored[: self._sets + 1]), *views]

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        words = super().buffers(arrays, slots, tokens, ops)[: self._sets]
        shapes = [(slots, *array.shape[2:]) for array in arrays[self._sets :]]
        return [*words, *(plgpu.SMEM(shape, jnp.float16) for shape in shapes)]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        words = self._sets
        yield from super().copies(arrays[:words], buffers[:words], unit, tokens, slot)
        for array, buffer in zip(arrays[words:], buffers[words:], strict=True):
            yield array.at[0, unit[1]], buffer.at[slot]

    def _of_chunk(
        self, buffers: Sequence[Any], stripe: Stripe, chunk: int, ops: Matrices
    ) -> list[jax.Array]:
        channels = pl.ds(self.layout.width * chunk, self.layout.width)
        scale, zero = buffers[self._sets], buffers[-1]
        places = (scale, 0), (zero, zero.shape[1] > 1)
        rows = [ref.at[stripe.slot, pl.ds(int(i), 1), channels] for ref, i in places]
        return [ops.stacked([ops.load_rows(row, SIDE)], SPAN) for row in rows]


class CodebookValues(CodebookSide, GroupedValues):
    """Weighted values of a stripe."""
