"""Codes that index a table, as warps read them: entries straight from words into a tensor core's
operand (table_lookup.py).

    scores of a span             sum_g s_g (q_g . table[c]) + z_g sum(q_g)
    weighted values of a span    p . (table[c] s + z)

s and z belong to a token and a group of channels, so all but the look-up is as for uniform groups
of channels (grouped.py), without a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.mosaic.grouped import GroupedKeys, GroupedSide, GroupedValues
from pallas_kernels.mosaic.matrices import Matrices
from pallas_kernels.mosaic.table_lookup import entries, in_registers, packed
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN


class CodebookSide(GroupedSide):
    """The stored arrays of one side, and their buffers in shared memory."""

    @classmethod
    def of(cls, reader: Any, span: int) -> Any:
        assert span == SPAN, "packed rows come in whole spans"
        assert reader.affine == "tokens", "route.unsupported refuses scales of channels"
        return cls(GroupedReader(reader.layout, "channels", reader.group, None))

    @property
    def _sets(self) -> int:
        return len(self.layout.sets)

    def offset(self, slot: int, chunk: int) -> float:
        return 0.0

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return [packed(stored[self._sets])]

    def table(self, refs: Sequence[Any], ops: Matrices) -> list[jax.Array]:
        [ref] = refs
        return in_registers([ref[i] for i in range(ref.shape[0])], ops.interpret)

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return super().views([*stored[: self._sets], *stored[self._sets + 1 :]])

    def _numbers(self, words: Any, table: Any, axis: int, ops: Matrices) -> list[jax.Array]:
        return entries(words, self.layout, table, axis, ops.interpret)


class CodebookKeys(CodebookSide, GroupedKeys):
    """Scores of a stripe."""


class CodebookValues(CodebookSide, GroupedValues):
    """Weighted values of a stripe."""
