"""Keys and values in runs of channels of one width each, with one factor for each token and head
(readers/runs.py), as warps read them.

    scores    g_t sum_c x_tc (s step cos)_dc q_c + x_tc (s step sin)_dc q'_c
                + sum_c (mu cos)_dc q_c + (mu sin)_dc q'_c        q' = (q_2, q_1)_pair
    values    sum_t (p_t g_t) x_tc

A warp's tokens (run_words.py) are at

    position = (sink + first token of the stripe + 2 p) + 8 i + d,    d = 32 s + r

Its queries are turned back by the sum in brackets, and by 8 from each slot i to the next. Keys meet
tables for the distances d, which are the same for all warps, slots and stripes, so a block copies
them to shared memory once for each head. A RoPE pair is two neighbouring channels, so one register,
and q' exchanges its halves. The sine of a pair's second channel is stored with a minus.

x = code + 1/2 - 2^(b-1) enters products of keys exactly, and is multiplied by the tables in fp16.
Codes of values enter products as they were unpacked, and a product with constants takes the rest
off.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

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
from pallas_kernels.mosaic.registers import LANES, ROWS, SIDE, WARPS
from pallas_kernels.mosaic.run_codes import bias, codes, middle
from pallas_kernels.mosaic.run_words import (
    SLOTS,
    STRIPE,
    TOKENS,
    PlaneSet,
    beside,
    load_factors,
    load_table,
    load_words,
    swapped,
    token_of,
    turned,
)
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.readers.run_chunks import WIDTH, RunPiece
from pallas_kernels.readers.runs import RunsKeys as KeysReader
from pallas_kernels.readers.runs import RunsReader
from pallas_kernels.readers.shared import query_planes
from pallas_kernels.tiles.layout import SPAN


class RunStripe(Stripe):
    """A stripe of 256 tokens, of which each warp has two of every eight."""

    @property
    def spans(self) -> Any:
        return pl.ds(STRIPE // SPAN * self.number, STRIPE // SPAN)

    def token_numbers(self, shape: tuple[int, ...], axis: int | None) -> jax.Array:
        assert axis is not None, "no number belongs to a warp's whole span"
        warps, places = (
            plgpu.broadcasted_iota(jnp.int32, shape, i, layout=LANES) for i in (0, axis)
        )
        return token_of(places, warps)


@dataclasses.dataclass(frozen=True)
class RunsSide:
    """The stored arrays of one side, and their buffers in shared memory: the words of each plane
    set of each run, and the tokens' scales."""

    reader: RunsReader

    @classmethod
    def of(cls, reader: Any, span: int) -> Any:
        assert span == TOKENS, "a warp reads a fourth of a tile"
        return cls(reader)

    @property
    def planes(self) -> list[PlaneSet]:
        """Return the plane sets in the order of their words."""
        return [PlaneSet(layout, bits) for layout in self.reader.layouts for bits in layout.sets]

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return []

    def table(self, refs: Sequence[Any], ops: Matrices) -> None:
        return None

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return words [B, K, rows, tiles, channels], and scales [B, K, spans, SPAN]."""
        words = [
            array.reshape(*array.shape[:3], plane.tiles, -1)
            for plane, array in zip(self.planes, stored, strict=False)
        ]
        scale = stored[len(words)]
        return [*words, scale.reshape(*scale.shape[:2], -1, SPAN)]

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        """Return the shared memory for `slots` tiles of `views`."""
        words = [
            plgpu.SMEM(
                (slots, tokens // plane.layout.slots, plane.tiles, plane.layout.channels), jnp.int16
            )
            for plane in self.planes
        ]
        return [*words, plgpu.SMEM((slots, tokens // SPAN, SPAN), jnp.int8)]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Return what a tile of one unit's tokens is copied from and to."""

        def every(size: int) -> Any:
            return pl.ds(lax.div(tokens.start, jnp.int32(size)), tokens.size // size)

        planes = self.planes
        for plane, array, buffer in zip(planes, arrays, buffers, strict=False):
            of_row = plane.layout.slots
            yield array.at[*unit, every(of_row)], buffer.at[slot]
        yield arrays[len(planes)].at[*unit, every(SPAN)], buffers[len(planes)].at[slot]

    def factors(
        self, buffers: Sequence[Any], stripe: Stripe, columns: int, ops: Matrices
    ) -> jax.Array:
        """Return g of a warp's tokens, [WARPS, TOKENS, columns]. It is finite, whatever unused
        capacity holds."""
        scales = buffers[len(self.planes)].at[stripe.slot, stripe.spans]
        return load_factors(scales, columns, ops.interpret)

    def _codes(
        self,
        buffers: Sequence[Any],
        stripe: Stripe,
        piece: RunPiece,
        transposed: bool,
        ops: Matrices,
    ) -> list[jax.Array]:
        """Return bias + code of a piece of a chunk for each slot, or the transpose."""
        layout = self.reader.layouts[piece.run]
        before = sum(len(other.sets) for other in self.reader.layouts[: piece.run])
        columns = pl.ds(piece.column, piece.channels)
        rows = STRIPE // layout.slots
        at = stripe.slot, pl.ds(rows * stripe.number, rows), slice(None), columns
        words = [
            load_words(buffer.at[at], PlaneSet(layout, bits), transposed, ops.interpret)
            for buffer, bits in zip(buffers[before:], layout.sets, strict=False)
        ]
        return codes(words, layout, transposed, ops.interpret)

    def _offset(self, piece: RunPiece, slot: int) -> float:
        """Return what `_codes` has beside x."""
        bits = self.reader.layouts[piece.run].bits
        return bias(bits, slot) + middle(bits)


@dataclasses.dataclass(frozen=True)
class RunsKeys(RunsSide):
    """Scores of a stripe of keys before RoPE."""

    reader: KeysReader
    tile: int = STRIPE  # tokens

    @property
    def together(self) -> int:
        """Return the number of slots whose codes are in registers at a time."""
        return SLOTS

    @property
    def chunks(self) -> tuple[int, int]:
        return self.reader.channels // WIDTH, WIDTH

    def query(self, q: jax.Array, stored: Sequence[jax.Array]) -> jax.Array:
        """Return queries [B, K, chunks, columns, WIDTH]."""
        return query_planes(self.reader.ordered(q, stored), self.chunks[0])

    def opened(self, planes: Sequence[jax.Array], table: None, ops: Matrices) -> Any:
        return planes

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the views of every side, and cosines and sines of the positions that warps turn
        queries back by, those of a tile's stripes one after the other, [K, tiles, 2 * stripes,
        WARPS, H]."""
        views = super().views(stored)
        capacity = SPAN * views[-1].shape[2]
        tiles = jnp.arange(-(-capacity // self.tile), dtype=jnp.int32)
        starts = jnp.minimum(self.tile * tiles, capacity - self.tile)[:, None, None]
        stripe, warp = (jnp.arange(n, dtype=jnp.int32) for n in (self.tile // STRIPE, WARPS))
        starts = self.reader.sink + starts + STRIPE * stripe[None, :, None] + 2 * warp[None, None]
        tables = [
            table.reshape(table.shape[0], *starts.shape, -1)
            for table in self._angles(stored, starts.reshape(-1))
        ]
        both = jnp.stack(tables, axis=3).astype(jnp.float16)
        return [*views, both.reshape(*both.shape[:2], -1, *both.shape[4:])]

    def fixed(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return, for each head, the tables of `KeysReader.row_tables` [K, 4, H / SIDE, ROWS, SIDE]
        for the distances in a slot, and cosines and sines of the distance of slots [K, 2, H]."""
        row = jnp.arange(ROWS, dtype=jnp.int32)
        tables = self.reader.row_tables(stored, row // 2 * SPAN + row % 2)
        tables = [_signed(table) if i % 2 else table for i, table in enumerate(tables)]
        tables = jnp.stack(tables, axis=1)
        tables = jnp.swapaxes(tables.reshape(*tables.shape[:3], -1, SIDE), 2, 3)
        step = self._angles(stored, jnp.full(1, 2 * WARPS, jnp.int32))
        return [tables, jnp.concatenate(step, axis=1).astype(jnp.float16)]

    def _angles(self, stored: Sequence[jax.Array], positions: jax.Array) -> list[jax.Array]:
        cos, sin = self.reader.angles(stored, positions)
        return [cos, _signed(sin)]

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        turned_back = plgpu.SMEM((slots, *arrays[-1].shape[2:]), jnp.float16)
        return [*super().buffers(arrays, slots, tokens, ops), turned_back]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        yield from super().copies(arrays, buffers, unit, tokens, slot)
        # the last tile ends at the end of the arrays
        tile = lax.div(tokens.start + (self.tile - 1), jnp.int32(self.tile))
        place = len(self.planes) + 1
        yield arrays[place].at[unit[1], tile], buffers[place].at[slot]

    def scores(
        self, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        """Return log2(e) / sqrt(H) * q . R(position) k of a stripe's tokens, [WARPS, TOKENS,
        columns]. Scores of dead tokens may be anything."""
        turned_back, tables, step = buffers[len(self.planes) + 1 :][:3]
        columns, planes = query[0].shape[1], list(query)
        none = splat((WARPS, ROWS, columns), 0.0)
        sums, means = [none] * SLOTS, [none] * SLOTS
        for first in range(0, SLOTS, self.together):
            slots = range(first, first + self.together)
            rows_of = self._rows(buffers, stripe, slots, ops)
            for chunk, q in enumerate(planes):
                channels, matrices = pl.ds(WIDTH * chunk, WIDTH), pl.ds(2 * chunk, 2)
                cos, sin, mean_cos, mean_sin = (
                    load_table(tables.at[i, matrices], ops.interpret) for i in range(4)
                )
                rows = rows_of(chunk)
                partner = swapped(q, ops.interpret)
                for i, slot in enumerate(slots):
                    turns = [
                        step.at[pl.ds(of_sin, 1), channels]
                        if slot
                        else turned_back.at[stripe.slot, 2 * stripe.number + of_sin, :, channels]
                        for of_sin in range(2)
                    ]
                    of_turn = (ops.load_rows(turn, columns) for turn in turns)
                    q = turned(q, partner, *of_turn, ops.interpret)
                    partner = swapped(q, ops.interpret)
                    if rows:
                        sums[slot] = ops.product(sums[slot], rows[i] * cos, q)
                        sums[slot] = ops.product(sums[slot], rows[i] * sin, partner)
                    means[slot] = ops.product(means[slot], mean_cos, q)
                    means[slot] = ops.product(means[slot], mean_sin, partner)
                planes[chunk] = q
        factors = self.factors(buffers, stripe, columns, ops)
        return ops.stacked(sums, TOKENS) * factors + ops.stacked(means, TOKENS)

    def _rows(
        self, buffers: Sequence[Any], stripe: Stripe, slots: range, ops: Matrices
    ) -> Callable[[int], list[jax.Array]]:
        """Return what gives a chunk of (k - mu) / g without s and step, for each of the slots, or
        none if it is not stored."""
        return lambda chunk: self._numbers(buffers, stripe, chunk, slots, ops)

    def _numbers(
        self, buffers: Sequence[Any], stripe: Stripe, chunk: int, slots: range, ops: Matrices
    ) -> list[jax.Array]:
        """Return x of a chunk for each of the slots, or none if it is not stored."""
        if chunk >= len(self.reader.pieces):
            return []
        pieces = self.reader.pieces[chunk]
        of_pieces = [
            [
                codes[slot] - splat(codes[slot].shape, self._offset(piece, slot), jnp.float16)
                for slot in slots
            ]
            for piece in pieces
            for codes in [self._codes(buffers, stripe, piece, False, ops)]
        ]
        if sum(piece.channels for piece in pieces) < WIDTH:
            of_pieces.append([splat((WARPS, ROWS, SIDE), 0.0, jnp.float16)] * len(slots))
        return [beside(parts, 2, ops.interpret) for parts in zip(*of_pieces, strict=True)]


class RunsValues(RunsSide):
    """Weighted x of a stripe of values."""

    weights_dtype = jnp.float16

    @property
    def chunks(self) -> tuple[int, int]:
        return len(self.reader.pieces), WIDTH

    def weighted(
        self, weights: jax.Array, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        """Return weights [WARPS, TOKENS, columns] times g, in fp16."""
        factors = self.factors(buffers, stripe, weights.shape[2], ops)
        return (weights * factors).astype(self.weights_dtype)

    def weigh(
        self,
        weights: jax.Array,
        buffers: Sequence[Any],
        stripe: Stripe,
        sums: Sequence[jax.Array],
        table: None,
        ops: Matrices,
    ) -> list[jax.Array]:
        """Add a stripe's x to `sums` [WARPS, WIDTH, columns], one for each chunk, weighted by
        [WARPS, columns, TOKENS] in fp16. Weights of dead tokens are 0."""
        of_slots = [weights[:, :, ROWS * i : ROWS * (i + 1)] for i in range(SLOTS)]
        none = splat((WARPS, ROWS, weights.shape[1]), 0.0)
        starts: dict[tuple[float, ...], jax.Array] = {}
        added = []
        for pieces, before in zip(self.reader.pieces, sums, strict=True):
            of_pieces, offsets = [], []
            for piece in pieces:
                of_pieces.append(self._codes(buffers, stripe, piece, True, ops))
                key = tuple(self._offset(piece, slot) for slot in range(SLOTS))
                if key not in starts:
                    taken = [-x for x in key for _ in range(ROWS // SIDE)]
                    starts[key] = ops.product(none, ops.constants(taken), weights)
                offsets.append(starts[key][:, : piece.channels])
            if sum(piece.channels for piece in pieces) < WIDTH:
                of_pieces.append([splat((WARPS, SIDE, ROWS), 0.0, jnp.float16)] * SLOTS)
                offsets.append(splat((WARPS, SIDE, weights.shape[1]), 0.0))
            part = beside(offsets, 1, ops.interpret)
            for parts, weight in zip(zip(*of_pieces, strict=True), of_slots, strict=True):
                part = ops.product(part, beside(parts, 1, ops.interpret), weight)
            added.append(before + part)
        return added


def _signed(table: jax.Array) -> jax.Array:
    """Return sines as they meet the exchanged halves of a pair of queries."""
    sign = jnp.where(jnp.arange(table.shape[-1]) % 2, -1, 1).astype(table.dtype)
    return table * sign[None, None]
