"""Keys and values in uniform groups, as warps read them: codes straight from words into a tensor
core's operand, scales on what the products leave.

                        scores of a span                        weighted values of a span
    groups of channels  sum_g s_g (q_g . c_g) + z_g sum(q_g)    p . (c s + z), s and z of a token
                        s and z of a token                      and a group of channels
    groups of tokens    (q s) . c + q . z                       s (p . c) + z sum(p)
                        s and z of a channel                    s and z of a channel

A scale of a row of the product (a token's for scores, a channel's for values) multiplies fp32 sums,
and one of a summed axis multiplies the smaller operand: queries, once for a span. Only values in
groups of channels are dequantized number by number, because weights times scales may leave the
range of fp16.

Codes come with a bias, 2^i + code (tiles/layout.py). Each product starts from minus the bias times
the sum of the other operand, which a product with constants computes exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.registers import ROWS, SIDE, WARPS
from pallas_kernels.mosaic.stripes import Stripe, entry
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.shared import query_planes
from pallas_kernels.tiles.layout import SPAN, PlaneLayout


@dataclasses.dataclass(frozen=True)
class GroupedSide:
    """The stored arrays of one side, and their buffers in shared memory."""

    reader: GroupedReader

    @classmethod
    def of(cls, reader: Any, span: int) -> Any:
        """Return the side of a reader. `span` is the tokens of a warp."""
        assert span == SPAN, "packed rows come in whole spans"
        return cls(reader)

    @property
    def layout(self) -> PlaneLayout:
        return self.reader.layout

    @property
    def groups(self) -> int:
        return self.layout.channels // self.reader.group

    @property
    def asymmetric(self) -> bool:
        return self.reader.centre is None

    @property
    def together(self) -> int:
        """Return how many neighbouring spans share the scales of channels."""
        return self.reader.group // SPAN if self.reader.axis == "tokens" else 1

    def offset(self, slot: int, chunk: int) -> float:
        """Return what a code's number holds beside the distance from its zero."""
        return float(self.layout.field(slot, chunk).bias + (self.reader.centre or 0))

    def chunks_of(self, group: int) -> range:
        per_group = self.reader.group // self.layout.width
        return range(group * per_group, (group + 1) * per_group)

    @property
    def chunks(self) -> tuple[int, int]:
        return self.layout.chunks, self.layout.width

    def table(self, refs: Sequence[Any], ops: Matrices) -> Any:
        """Return what `opened` or `weigh` takes of the `constants`."""
        return None

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arrays that a kernel reads once, before its loop."""
        return []

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return words [B, K, rows, words] and, without a copy, scales by span, [B, K, groups,
        spans, SPAN] or [B, K, spans / together, channels]."""
        sets = len(self.layout.sets)
        views = list(stored[:sets])
        for scale in stored[sets:]:
            by_channels = self.reader.axis == "channels"
            shape = (*scale.shape[:3], -1, SPAN) if by_channels else scale.shape
            views.append(scale.reshape(shape))
        return views

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        """Return the shared memory for `slots` tiles of `tokens` of `views`."""
        spans, rows = tokens // SPAN, tokens // self.layout.slots
        sets = [
            ops.buffer(slots, rows, self.layout.words(bits), jnp.int16) for bits in self.layout.sets
        ]
        shape = (
            (slots, self.groups, spans, SPAN)
            if self.reader.axis == "channels"
            else (slots, spans // self.together, self.layout.channels)
        )
        return [*sets, *[plgpu.SMEM(shape, jnp.uint16)] * (2 if self.asymmetric else 1)]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Return what a tile of one unit's tokens is copied from and to."""
        sets = len(self.layout.sets)

        def every(size: int) -> Any:
            return pl.ds(lax.div(tokens.start, jnp.int32(size)), tokens.size // size)

        rows, spans, groups = (every(n) for n in (self.layout.slots, SPAN, SPAN * self.together))
        for i, (array, buffer) in enumerate(zip(arrays, buffers, strict=True)):
            if i < sets:
                source = array.at[*unit, rows]
            elif self.reader.axis == "channels":
                source = array.at[*entry(array, unit), :, spans]
            else:
                source = array.at[*entry(array, unit), groups]
            yield source, buffer.at[slot]

    def _words(
        self, buffers: Sequence[Any], stripe: Stripe, ops: Matrices, transposed: bool = False
    ) -> list[jax.Array]:
        """Load the words of each plane set, [WARPS, rows, words], or the transpose of each
        warp's."""
        rows = SPAN // self.layout.slots
        of_stripe = stripe.slot, pl.ds(WARPS * rows * stripe.number, WARPS * rows)
        return [
            ops.load_tile(buffer.at[of_stripe], rows, jnp.int16, transposed)
            for buffer in buffers[: len(self.layout.sets)]
        ]

    def _scales(
        self,
        buffers: Sequence[Any],
        stripe: Stripe,
        load: Callable[[Any], Any],
        group: int | None = None,
    ) -> list[Any]:
        """Load the scales, and the zeros if there are any, of a group of channels for all tokens,
        or of all channels."""
        groups = WARPS // self.together
        at = (stripe.slot, pl.ds(groups * stripe.number, groups))
        if group is not None:
            at = (stripe.slot, group, stripe.spans)
        return [load(buffer.at[at]) for buffer in buffers[len(self.layout.sets) :]]

    def _chunk(self, chunk: int) -> slice:
        return slice(self.layout.width * chunk, self.layout.width * (chunk + 1))

    def _numbers(self, words: Any, table: Any, axis: int, ops: Matrices) -> list[jax.Array]:
        """Return `offset` plus the number of each code, by chunks. `axis` is the tokens'."""
        return [ops.codes(words, self.layout, c, axis) for c in range(self.layout.chunks)]


class GroupedKeys(GroupedSide):
    """Scores of a stripe."""

    def query(self, q: jax.Array, stored: Sequence[jax.Array]) -> jax.Array:
        """Return queries [B, K, columns, H] in chunks [B, K, chunks, columns, width]."""
        return query_planes(q, self.layout.chunks)

    def opened(self, planes: Sequence[jax.Array], table: Any, ops: Matrices) -> Any:
        """Return the query argument of `scores` from chunks [WARPS, columns, width] of queries and
        the `constants`. A kernel calls this once, before its loop."""
        if self.reader.axis == "tokens":
            return planes, None, None, table
        none = splat((WARPS, ROWS, planes[0].shape[1]), 0.0)

        def total(factor: Callable[[int], float], group: int) -> jax.Array:
            sums = none
            for c in self.chunks_of(group):
                sums = ops.product(sums, self._constant(factor(c), ops), planes[c])
            return sums

        starts = [
            [
                total(lambda c, slot=slot: -self.offset(slot, c), group)
                for group in range(self.groups)
            ]
            for slot in range(self.layout.slots)
        ]
        sums = [total(lambda c: 1.0, g) for g in range(self.groups)] if self.asymmetric else None
        return planes, starts, sums, table

    def _constant(self, value: float, ops: Matrices) -> jax.Array:
        return ops.constants([value] * (self.layout.width // SIDE))

    def scores(
        self, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        """Return log2(e) / sqrt(H) * q . k of a stripe's tokens, [WARPS, SPAN, columns]. Scores of
        dead tokens may be anything."""
        words = self._words(buffers, stripe, ops)
        by_group = self._of_channels if self.reader.axis == "channels" else self._of_tokens
        return by_group(words, query, buffers, stripe, ops)

    def _of_channels(
        self, words: Any, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        planes, starts, sums, table = query
        columns, numbers = planes[0].shape[1], self._numbers(words, table, 1, ops)
        total = None
        for group in range(self.groups):
            part = ops.stacked([of_slot[group] for of_slot in starts], SPAN)
            for c in self.chunks_of(group):
                part = ops.product(part, numbers[c], planes[c])
            scale, *zeros = self._scales(
                buffers, stripe, lambda ref: ops.load_columns(ref, columns), group
            )
            total = part * scale if total is None else total + part * scale
            for zero in zeros:
                total = total + ops.stacked([sums[group]], SPAN) * zero
        assert total is not None
        return total

    def _of_tokens(
        self, words: Any, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        planes, columns = query[0], query[0][0].shape[1]
        start = splat((WARPS, ROWS, columns), 0.0)
        scale, *_ = self._scales(buffers, stripe, lambda ref: ops.load_rows(ref, columns))
        _, *zeros = self._scales(buffers, stripe, lambda ref: ops.load_rows(ref, ROWS))
        scaled = []
        for c, plane in enumerate(planes):
            scaled.append(plane * scale[:, :, self._chunk(c)])
            for zero in zeros:
                start = ops.product(start, zero[:, :, self._chunk(c)], plane)
        starts = [start] * self.layout.slots
        for slot in range(self.layout.slots):
            for c, plane in enumerate(scaled):
                bias = self._constant(-self.offset(slot, c), ops)
                starts[slot] = ops.product(starts[slot], bias, plane)
        total = ops.stacked(starts, SPAN)
        for c, plane in enumerate(scaled):
            total = ops.product(total, ops.codes(words, self.layout, c, 1), plane)
        return total

    def dequantized(
        self, buffers: Sequence[Any], stripe: Stripe, table: Any, ops: Matrices
    ) -> Callable[[int], jax.Array]:
        """Return a function that dequantizes the keys of a chunk, [WARPS, SPAN, width] in fp16."""
        words = self._words(buffers, stripe, ops)
        numbers, width = self._numbers(words, table, 1, ops), self.layout.width

        def keys(chunk: int) -> jax.Array:
            values = numbers[chunk]
            offsets = [self.offset(slot, chunk) for slot in range(self.layout.slots)]
            if any(offsets):
                of_slots = [splat((WARPS, SIDE, width), x, jnp.float16) for x in offsets]
                values = values - ops.stacked(of_slots, SPAN)
            scale, *zeros = self._of_chunk(buffers, stripe, chunk, ops)
            values = values * scale
            for zero in zeros:
                values = values + zero
            return values

        return keys

    def _of_chunk(
        self, buffers: Sequence[Any], stripe: Stripe, chunk: int, ops: Matrices
    ) -> list[jax.Array]:
        """Load the scales, and the zeros if there are any, of a chunk's keys, [WARPS, SPAN, width]
        in fp16."""
        width = self.layout.width

        def by_token(ref: Any) -> jax.Array:
            return ops.load_columns(ref, width, jnp.float16)

        def by_channel(ref: Any) -> jax.Array:
            return ops.stacked([ops.load_rows(ref.at[:, pl.ds(width * chunk, width)], SIDE)], SPAN)

        if self.reader.axis == "channels":
            return self._scales(buffers, stripe, by_token, chunk * width // self.reader.group)
        return self._scales(buffers, stripe, by_channel)


class GroupedValues(GroupedSide):
    """Weighted values of a stripe."""

    weights_dtype = jnp.float16

    def weigh(
        self,
        weights: jax.Array,
        buffers: Sequence[Any],
        stripe: Stripe,
        sums: Sequence[jax.Array],
        table: Any,
        ops: Matrices,
    ) -> list[jax.Array]:
        """Add a stripe's values to `sums` [WARPS, width, columns], one for each chunk, weighted by
        [WARPS, columns, SPAN] in fp16. Weights of dead tokens are 0."""
        words = self._words(buffers, stripe, ops, transposed=True)
        if self.reader.axis == "tokens":
            return self._of_tokens(words, weights, buffers, stripe, sums, ops)
        numbers = self._numbers(words, table, 2, ops)
        return self._of_channels(numbers, weights, buffers, stripe, sums, ops)

    def _offsets(self, chunk: int, ops: Matrices) -> jax.Array:
        """Return the offsets of a chunk's codes by token, the same in SIDE rows."""
        slots = self.layout.slots
        return ops.constants([self.offset(i * slots // 4, chunk) for i in range(SPAN // SIDE)])

    def _of_tokens(
        self, words: Any, weights: Any, buffers: Any, stripe: Stripe, sums: Any, ops: Matrices
    ) -> list[jax.Array]:
        columns, width = weights.shape[1], self.layout.width
        none = splat((WARPS, ROWS, columns), 0.0)
        mass = ops.product(none, ops.constants([1.0] * (SPAN // SIDE)), weights)
        starts: dict[Any, jax.Array] = {}
        scale, *zeros = (
            stripe.zero_dead(x, None)
            for x in self._scales(buffers, stripe, lambda ref: ops.load_columns(ref, columns))
        )
        added = []
        for c, before in enumerate(sums):
            key = tuple(self.offset(slot, c) for slot in range(self.layout.slots))
            if key not in starts:
                starts[key] = ops.product(none, -self._offsets(c, ops), weights)
            part = ops.product(starts[key], ops.codes(words, self.layout, c, 2), weights)
            after = before + part * scale[:, self._chunk(c)]
            for zero in zeros:
                after = after + ops.stacked([mass], width) * zero[:, self._chunk(c)]
            added.append(after)
        return added

    def _of_channels(
        self, numbers: Any, weights: Any, buffers: Any, stripe: Stripe, sums: Any, ops: Matrices
    ) -> list[jax.Array]:
        width = self.layout.width
        added = list(sums)
        for group in range(self.groups):
            scale, *zeros = (
                stripe.zero_dead(x, 2)
                for x in self._scales(buffers, stripe, lambda ref: ops.load_rows(ref, ROWS), group)
            )
            scale, *zeros = (ops.stacked([x], width) for x in (scale, *zeros))
            for c in self.chunks_of(group):
                values = numbers[c]
                if any(self.offset(slot, c) for slot in range(self.layout.slots)):
                    values = values - ops.stacked([self._offsets(c, ops)], width)
                values = values * scale
                for zero in zeros:
                    values = values + zero
                added[c] = ops.product(added[c], values, weights)
        return added
