"""Write the blocks that leave their ring on Mosaic GPU, in each form that writers have
(quantize/writer.py)."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.outlier_slots import collect
from pallas_kernels.mosaic.quantize import Spans, quantize_spans
from pallas_kernels.mosaic.quantize_polar import PolarGroup, quantize_polar
from pallas_kernels.mosaic.quantize_table import Pool, quantize_table_span
from pallas_kernels.mosaic.registers import SIDE, WARPS
from pallas_kernels.mosaic.ring import RingRows
from pallas_kernels.mosaic.rows import Rows
from pallas_kernels.mosaic.stripes import entry
from pallas_kernels.quantize.blocks import GroupedBlocks, RowBlocks
from pallas_kernels.quantize.polar import PolarBlocks
from pallas_kernels.quantize.table import TableBlocks
from pallas_kernels.quantize.writer import BlockWriter
from pallas_kernels.tiles.layout import SPAN, PlaneLayout


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit of a block, and one of its programs.

    Args:
        rows_of: returns a head's rows.
        of: the row of the batch and the KV head.
        heads: the number of KV heads.
        program: among those of the unit.
        place: of its first token in the body.
        inputs: refs of what the writer reads, [B, K, ...] with axes that may be 1 long.
        body: refs of the body's arrays.
    """

    rows_of: Callable[[Any], RingRows]
    of: tuple[Any, Any]
    heads: int
    program: Any
    place: Any
    inputs: Sequence[Any]
    body: Sequence[Any]
    interpret: bool

    def write(self, writer: BlockWriter) -> None:
        if isinstance(writer, GroupedBlocks):
            self._grouped(writer)
        elif isinstance(writer, TableBlocks):
            self._table(writer)
        elif isinstance(writer, PolarBlocks):
            self._polar(writer)
        else:
            assert isinstance(writer, RowBlocks), "route.unwritten refuses others"
            self._rows(writer.tokens)

    def _words(self, layout: PlaneLayout, tokens: int) -> list[Any]:
        rows = pl.ds(lax.div(self.place, jnp.int32(layout.slots)), tokens // layout.slots)
        return [ref.at[(*self.of, rows)] for ref in self.body[: len(layout.sets)]]

    def _of_groups(self, refs: Sequence[Any], tokens: int) -> list[Any]:
        """Return the row of this unit in arrays [B, K, groups, channels]."""
        group = pl.ds(lax.div(self.place, jnp.int32(tokens)), 1)
        return [ref.at[(*self.of, group)] for ref in refs]

    def _of_tokens(self, refs: Sequence[Any]) -> list[Any]:
        """Return the tokens of a span in arrays [B, K, groups, tokens]."""
        tokens = pl.ds(self.place, SPAN)
        return [ref.at[(*entry(ref, self.of), slice(None), tokens)] for ref in refs]

    def _grouped(self, writer: GroupedBlocks) -> None:
        reader, divisor = writer.job.reader, None
        scales = self.body[len(reader.layout.sets) :]
        if reader.axis == "tokens":
            scales = self._of_groups(scales, SPAN)
        else:
            scales = self._of_tokens(scales)
        if self.inputs:
            divisor = self.inputs[0].at[entry(self.inputs[0], self.of)]
        words = self._words(reader.layout, SPAN)
        spans = Spans(self.rows_of(self.of[1]), divisor, words, scales)
        quantize_spans(spans, writer.job, 0, self.interpret)

    def _table(self, writer: TableBlocks) -> None:
        sets = len(writer.layout.sets)
        scales, of_slots = [], self.body[sets:]
        if writer.group is not None:
            scales, of_slots = self._of_tokens(self.body[sets : sets + 2]), self.body[sets + 2 :]
        levels, values, *inputs = (ref.at[0] for ref in self.inputs)
        pool = Pool(self.rows_of, self.heads, writer, levels, values, inputs, self.interpret)
        ranges = pool.of_tokens() if writer.slots and writer.group else None
        words, head = self._words(writer.layout, SPAN), self.of[1]
        quantize_table_span(pool, ranges, head, words, scales)
        if writer.slots is not None:
            number = lax.div(self.place, jnp.int32(writer.slots.tokens))
            collect(pool, ranges, head, number, [ref.at[self.of[0]] for ref in of_slots])

    def _polar(self, writer: PolarBlocks) -> None:
        statistics = self._of_groups(self.body[len(writer.layout.sets) :], writer.group)
        words = self._words(writer.layout, writer.group)
        first = self.program * writer.columns
        group = PolarGroup(self.rows_of(self.of[1]), words, statistics, first)
        quantize_polar(group, writer, self.interpret)

    def _rows(self, tokens: int) -> None:
        """Copy rows, some columns by each warp."""
        [body], some, columns = self.body, Rows(self.interpret, 0, WARPS), slice(None)
        x = self.rows_of(self.of[1]).load(some, 0, max(tokens, SIDE), columns)
        some.store(body.at[(*self.of, pl.ds(self.place, tokens))], x.astype(body.dtype), tokens)
