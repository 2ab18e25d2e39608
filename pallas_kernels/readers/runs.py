"""Read rows in runs of channels of one width each, with one factor for each token and head: the
method `waterfill`.

    u^_tc = g_t x_tc step_c,    x = code + 1/2 - 2^(b-1),    g_t = 2^(scale_t / 8)
            b and step are of the channel's run

    scores    q . R(p) k^ = g_t sum_c s_c step_c x_c (q_c cos + q'_c sin)
                            + sum_c mu_c (q_c cos + q'_c sin)        cos, sin of p w_c
    values    sum_t p_t v^_t = (step_c sum_t p_t g_t x_tc)_c A^-1 + mu sum_t p_t

Keys are stored before RoPE, in a calibrated order of channels that puts the two of a pair side by
side. q' holds the partner of each query: for the first of a pair its second, and for the second
minus its first. So a rotation exchanges nothing between lanes. A token is at position

    p = start of the part + (32 s + r) + 2 k
        span s of the tile, row r of two, slot k of the part

The queries are turned back by the start of the part, and by 2 from each slot to the next. Keys meet
the cosines and sines of their rows 32 s + r, which all parts share, times s step. So do the means.
All tables, queries and products are fp16, and x is exact. run_chunks.py reads the words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, Int

from pallas_kernels.angles import cos_and_sin
from pallas_kernels.decode_attention.partial_attention import PartialAttention
from pallas_kernels.readers.base import LoopStep, Reader, SlotRows
from pallas_kernels.readers.rotary import turned_back
from pallas_kernels.readers.run_chunks import (
    ROWS,
    RUN,
    SLOTS,
    TILE,
    WIDTH,
    RunPiece,
    channels_of_lanes,
    pieces_of_chunks,
    planes_of_chunk,
    subtracted,
    taken,
)
from pallas_kernels.readers.shared import dot, query_planes
from pallas_kernels.tiles.arithmetic import exp2, half_multiply, multiply_add
from pallas_kernels.tiles.halves import Half, joined
from pallas_kernels.tiles.layout import SPAN, PlaneLayout
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.tiles.words import Bit, SingleWords, paired

PER_OCTAVE = 8  # steps of the tokens' factors in a factor of 2
TOGETHER = 4  # slots of a step: with all 16, compilers take minutes (docs/kernels.md)


@dataclasses.dataclass(frozen=True)
class RunsReader(Reader):
    """The common part of keys and values in runs.

    Stored arrays: the words of the plane sets of each run [B, K, S / n, words], the widest run
    first, each one plane of a multiple of 8 channels; the scale of the tokens [B, K, S], int8; the
    steps of widths 1, 2, ... [8], fp32; then the arrays of keys or of values. S >= 256.
    """

    layouts: tuple[PlaneLayout, ...]
    channels: int

    @property
    def slots(self) -> int:
        return SLOTS

    @property
    def row_bytes(self) -> int:
        return sum(layout.bits * layout.channels for layout in self.layouts) // 8

    @property
    def step(self) -> LoopStep:
        return LoopStep(TILE, 1)

    @property
    def parts(self) -> int:
        return SLOTS // TOGETHER

    @property
    def min_tile(self) -> int:
        return TILE

    @property
    def longest_tile(self) -> int:
        return TILE

    @property
    def stored(self) -> int:
        """Return how many channels are stored."""
        return sum(layout.channels for layout in self.layouts)

    @property
    def pieces(self) -> tuple[tuple[RunPiece, ...], ...]:
        """Return the content of each stored chunk."""
        return pieces_of_chunks(self.layouts)

    @property
    def _order(self) -> np.ndarray:
        """Return the sorted channel in each lane of the chunks. Channels that are not stored come
        last.
        """
        return np.concatenate(
            [channels_of_lanes(self.layouts), np.arange(self.stored, self.channels)]
        )

    @property
    def words_count(self) -> int:
        """Return the number of stored arrays of words, which come first."""
        return sum(len(layout.sets) for layout in self.layouts)

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        words, scale = stored[: self.words_count], stored[self.words_count]
        shifts = [
            [TOGETHER * part // unit * unit for part in range(self.parts)]
            for unit in (TOGETHER, 2 * TOGETHER)
        ]
        return (
            *words,
            scale.reshape(*scale.shape[:2], scale.shape[2] // SPAN, SLOTS, RUN),
            jnp.asarray(shifts, jnp.int32)[None, None],
        )

    def _in_chunks(self, array: Array) -> Array:
        """Put sorted channels, the last axis, into the order of the lanes."""
        return taken(array, self._order)

    def _steps(self, stored: Sequence[Array]) -> Float[Array, " stored"]:
        """Return the step of each stored channel."""
        steps = stored[self.words_count + 1]
        return jnp.concatenate(
            [jnp.broadcast_to(steps[layout.bits - 1], layout.channels) for layout in self.layouts]
        )

    def _numbers(
        self, refs: Sequence[Any], chunk: int, tile: Tile, axis: int, asm: bool
    ) -> list[Half]:
        """Read x of a chunk of stored channels, exactly, for the tokens of each slot of the part.
        Lanes without a channel have code 0.
        """
        pieces = self.pieces[chunk]
        planes, shifts = planes_of_chunk(self.layouts, refs, pieces), refs[self.words_count + 1]
        tiles, by = [], []
        for (_, bits), halves in planes.items():
            first = jnp.int32(0) if bits <= TOGETHER else lax.rem(TOGETHER * tile.part, bits)
            units = [first + k for k in range(min(bits, TOGETHER))]
            tiles.append(
                [
                    functools.reduce(
                        lambda others, half, u=u: half.read(tile, u, others), halves, None
                    )
                    for u in units
                ]
            )
            by.append(shifts[int(bits > TOGETHER), pl.ds(tile.part, 1)][:, None])
        words = (SingleWords(tiles) if asm else paired(tiles, axis, tile.start)).shifted(by)
        middles = [2 ** (self.layouts[piece.run].bits - 1) - 0.5 for piece in pieces]
        places = [lowest + j for lowest, bits in planes for j in range(bits)]
        numbers = []
        for slot in range(TOGETHER):
            fields = [
                Bit(i, slot % bits, slot // bits * bits + j)
                for i, (_, bits) in enumerate(planes)
                for j in range(bits)
            ]
            # The bias is at most 512, so fp16 holds halves beside it.
            code, bias = words.number(fields, places, minimum=1)
            numbers.append(subtracted(code, [bias + middle for middle in middles], asm))
        return numbers

    def _factor(
        self, refs: Sequence[Any], slot: int, tile: Tile, asm: bool
    ) -> Float[Array, "16 1"]:
        """Return g of the tokens of a slot. It is finite, whatever unused capacity holds."""
        scale = refs[self.words_count][
            pl.ds(tile.offset(SPAN), TILE // SPAN), TOGETHER * tile.part + slot, :
        ].reshape(ROWS)
        return exp2(scale.astype(jnp.float32) * (1 / PER_OCTAVE), asm)[:, None]


@dataclasses.dataclass(frozen=True)
class RunsKeys(RunsReader):
    """Keys before RoPE.

    Stored arrays, after the steps: place [K, H] int32, the place of each channel in the order of
    storage, with pair (i, i + H/2) at neighbouring places; s and mu [K, H], in the model's order;
    inverse frequencies [H/2] and RoPE's attention factor [], fp32. Token t is at position sink + t.
    """

    sink: int = 0

    @property
    def turns(self) -> bool:
        return True

    @property
    def reads_shards(self) -> bool:
        return False

    def placed(self, sink: int, block: int, shards: int) -> RunsKeys:
        return dataclasses.replace(self, sink=sink)

    @property
    def chunks(self) -> tuple[int, int]:
        return self.channels // WIDTH, WIDTH

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        row = jnp.arange(ROWS, dtype=jnp.int32)
        tables = self.row_tables(stored, row // RUN * SPAN + row % RUN)
        return (*super().arrays(stored), *(table[None] for table in tables))

    def row_tables(
        self, stored: Sequence[Array], distances: Int[Array, " n"]
    ) -> list[Float16[Array, "K n H"]]:
        """Return s step times cosines and sines of distances, and the means times them, in the
        order of the lanes.
        """
        place, scale, mean = stored[self.words_count + 2 :][:3]
        order = self._in_chunks(jnp.argsort(place, axis=-1))
        scale, mean = (jnp.take_along_axis(a, order, axis=-1) for a in (scale, mean))
        steps = self._in_chunks(jnp.pad(self._steps(stored), (0, self.channels - self.stored)))
        cos, sin = self.angles(stored, distances)
        amounts = (scale * steps[None])[:, None], mean[:, None]
        return [(a * table).astype(jnp.float16) for a in amounts for table in (cos, sin)]

    def ordered(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> Array:
        """Return the queries in the order of the lanes, times RoPE's attention factor."""
        place, attention = stored[self.words_count + 2], stored[-1]
        order = self._in_chunks(jnp.argsort(place, axis=-1))
        return jnp.take_along_axis(q * attention, order[None, :, None], axis=-1)

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        ordered = self.ordered(q, stored)
        pairs = ordered.reshape(*q.shape[:3], self.channels // 2, 2)
        partners = jnp.stack([pairs[..., 1], -pairs[..., 0]], axis=-1).reshape(q.shape)
        capacity = stored[self.words_count].shape[2]
        counts = -(-capacity // TILE), self.parts
        tiles, parts = (jnp.arange(count, dtype=jnp.int32) for count in counts)
        starts = jnp.minimum(TILE * tiles, capacity - TILE)
        starts = self.sink + starts[:, None] + RUN * TOGETHER * parts[None]
        tables = [
            sign * table
            for positions in (starts.reshape(-1), jnp.full(1, RUN))
            for sign, table in zip((1, -1), self.angles(stored, positions), strict=True)
        ]
        count, width = self.chunks
        cuts = (
            table.astype(jnp.float16).reshape(1, table.shape[0], -1, count, width)
            for table in tables
        )
        return query_planes(ordered, count), query_planes(partners, count), *cuts

    def angles(
        self, stored: Sequence[Array], positions: Int[Array, " n"]
    ) -> tuple[Float[Array, "K n H"], Float[Array, "K n H"]]:
        """Return the cosines and sines of position * frequency, in the order of the lanes."""
        place, frequencies = stored[self.words_count + 2], stored[-2]
        pair = self._in_chunks(jnp.argsort(place, axis=-1)) % (self.channels // 2)
        cos, sin = cos_and_sin(positions, frequencies)
        return jnp.moveaxis(cos[:, pair], 0, 1), jnp.moveaxis(sin[:, pair], 0, 1)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        columns = query[0].shape[1]
        # the last tile ends at the end of the arrays
        start = (tile.start + TILE - 1) // TILE * self.parts + tile.part
        sums = [jnp.zeros((ROWS, columns), jnp.float32)] * (2 * TOGETHER)
        for chunk in range(self.chunks[0]):
            add = functools.partial(self._add_chunk, query, refs, start, tile, chunk, asm)
            # The condition is always true. It keeps loads at their use (rotary.py), and limits how
            # much is in registers at a time.
            sums = lax.cond(tile.start >= 0, add, lambda *sums: list(sums), *sums)
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [
            multiply_add(codes, self._factor(refs, k, tile, asm), means, asm)
            for k, (codes, means) in enumerate(pairs)
        ]

    def _add_chunk(
        self,
        query: Sequence[Any],
        refs: Sequence[Any],
        start: Int[Array, ""],
        tile: Tile,
        chunk: int,
        asm: bool,
        *sums: Float[Array, "16 GP"],
    ) -> list[Float[Array, "16 GP"]]:
        """Add a chunk of channels to the sums of each slot (of its codes, then of the means)."""
        turned = turned_back(
            (query[0][chunk], query[1][chunk]), [table[start, chunk] for table in query[2:4]], asm
        )
        of_chunk = pl.ds(WIDTH * chunk, WIDTH)
        cos, sin, mean_cos, mean_sin = (
            table[:, of_chunk] for table in refs[self.words_count + 2 :]
        )
        numbers = self._numbers(refs, chunk, tile, 1, asm) if chunk < len(self.pieces) else []
        slot_turn = [table[0, chunk] for table in query[4:6]]
        added = []
        for slot in range(TOGETHER):
            turned = turned_back(turned, slot_turn, asm) if slot else turned
            codes, means = sums[2 * slot : 2 * slot + 2]
            if numbers:
                codes = (
                    dot(joined(half_multiply(numbers[slot], cos, asm)), turned[0], (1, 1)) + codes
                )
                codes = (
                    dot(joined(half_multiply(numbers[slot], sin, asm)), turned[1], (1, 1)) + codes
                )
            means = dot(mean_sin, turned[1], (1, 1)) + (dot(mean_cos, turned[0], (1, 1)) + means)
            added += [codes, means]
        return added

    def weigh(
        self,
        weights: SlotRows,
        refs: Sequence[Any],
        tile: Tile,
        sums: list[Float[Array, "W GP"]],
        asm: bool,
    ) -> list[Array]:
        raise NotImplementedError("values are read by RunsValues")


@dataclasses.dataclass(frozen=True)
class RunsValues(RunsReader):
    """Values in a basis in which only the first channels are stored. A kernel sums g x, and
    `values_of` does the rest.

    Stored arrays, after the steps: A^-1 [K, H, H] (multiplied by rows from the left) and mu [K, H],
    fp32.
    """

    @property
    def chunks(self) -> tuple[int, int]:
        return len(self.pieces), WIDTH

    @property
    def weight_exponent(self) -> int:
        return 0  # times a token's factor of up to 2^16, a larger weight would leave fp16's range

    @property
    def sums_codes(self) -> bool:
        return True

    def values_of(
        self, part: PartialAttention, stored: Sequence[Array], first: int = 0
    ) -> PartialAttention:
        synthesis, mean = (
            array[first : first + part.o.shape[1]] for array in stored[self.words_count + 2 :]
        )
        sums = (
            taken(part.o[..., : self.stored], np.argsort(self._order)[: self.stored])
            * self._steps(stored)[None, None, None]
        )
        values = jnp.einsum(
            "bkgc,kce->bkge", sums, synthesis[:, : self.stored], precision=lax.Precision.HIGHEST
        )
        return part._replace(o=values + part.l * mean[None, :, None])

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        raise NotImplementedError("keys are read by RunsKeys")

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        raise NotImplementedError("keys are read by RunsKeys")

    def weigh(
        self,
        weights: SlotRows,
        refs: Sequence[Any],
        tile: Tile,
        sums: list[Float[Array, "W GP"]],
        asm: bool,
    ) -> list[Array]:
        halves = [
            (w * self._factor(refs, slot, tile, asm)).astype(jnp.float16)
            for slot, w in enumerate(weights)
        ]
        sums = list(sums)
        for chunk in range(len(sums)):
            for numbers, half in zip(self._numbers(refs, chunk, tile, 0, asm), halves, strict=True):
                sums[chunk] = sums[chunk] + dot(joined(numbers), half, (0, 0))
        return sums
