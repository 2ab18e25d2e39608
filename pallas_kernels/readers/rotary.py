"""Rotate keys that were cached before RoPE while they are read.

    score = q . R(position) k,     position = sink + number of the token in the body
    R(p + d) = R(p) R(d)

A tile of tokens starts at position p. The queries are turned back by p, once per tile. Keys are
turned by their distance d from the start, with the same small table of cosines and sines for every
tile. So a key costs two fp16 products and two multiply-adds per two pairs of channels, and no head
reads a table that grows with the context.

A shard of a body that was dealt out holds every D-th block. One table still turns a whole tile,
provided that the tile is a part of a block or whole blocks, because positions then jump by equal
amounts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, Int

from pallas_kernels.angles import cos_and_sin
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import LoopStep, Reader, SlotRows
from pallas_kernels.readers.shared import dot, query_planes
from pallas_kernels.readers.turn import TurnTables, turn
from pallas_kernels.tiles.arithmetic import half2
from pallas_kernels.tiles.halves import Half, by_halves, joined
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.tiles.tile import Tile

MAX_TILE = 128

QueriesAndPartners = tuple[Float16[Array, "GP W"], Float16[Array, "GP W"]]  # and their partners


@dataclasses.dataclass(frozen=True)
class RotatedReader(Reader):
    """Keys of another reader, rotated to their positions: pairs (i, i + H/2), k_rot = a (k1 cos -
    k2 sin, k2 cos + k1 sin).

    Stored arrays: the other reader's, then inverse_frequencies [H/2] and the attention factor a [],
    both fp32, and, if there are several shards, the number of this one, [] int32. Token t of shard
    s is at position

        sink + (t // block * shards + s) * block + t % block        sink + t, if there is one shard

    The halves of a head are whole chunks. Cosines, sines, queries and keys are fp16, before and
    after the rotation.
    """

    inner: Reader
    sink: int = 0
    block: int = SPAN
    shards: int = 1

    @property
    def turns(self) -> bool:
        return True

    def placed(self, sink: int, block: int, shards: int) -> RotatedReader:
        return dataclasses.replace(self, sink=sink, block=block, shards=shards)

    @property
    def slots(self) -> int:
        return self.inner.slots

    @property
    def chunks(self) -> tuple[int, int]:
        return self.inner.chunks

    @property
    def row_bytes(self) -> int:
        return self.inner.row_bytes

    @property
    def step(self) -> LoopStep:
        inner, (count, width) = self.inner.step, self.chunks
        tile = inner.tile // 2 if inner.crowded else min(inner.tile, 8192 // (count * width))
        return inner._replace(tile=tile, crowded=True)

    @property
    def adds_scores(self) -> bool:
        return self.inner.adds_scores

    @property
    def longest_tile(self) -> int:
        """Return the most tokens of a tile: a power of two, like the tile, that divides blocks or
        is a multiple of them.
        """
        of_block = self.block & -self.block
        if self.shards == 1 or of_block == self.block:
            return MAX_TILE
        return min(of_block, MAX_TILE)

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        inner, frequencies, _ = self.apart(stored)[:3]
        shape = (1, 1, MAX_TILE // SPAN, self.slots, SPAN // self.slots, frequencies.shape[0])
        tables = angle_tables(frequencies, self._distances(jnp.arange(MAX_TILE, dtype=jnp.int32)))
        return (*self.inner.arrays(inner), *(a.reshape(shape) for a in tables))

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        _, frequencies, factor, starts = self.apart(stored)
        cos, sin = angle_tables(frequencies, starts)
        count, width = self.chunks
        positions = (a.reshape(1, 1, -1, count // 2, width) for a in (cos, sin))
        return query_planes(q * factor, count), *positions

    def more_scores(
        self,
        q: Float[Array, "B k Q H"],
        stored: Sequence[Array],
        limits: Int[Array, " B"],
        launch: Launch,
        group: int,
        turned: TurnTables | None = None,
        first: int = 0,
    ) -> Float[Array, "B k G S"] | None:
        if not self.inner.adds_scores:
            return None
        inner, frequencies, factor, starts = self.apart(stored)
        return self.inner.more_scores(
            q * factor, inner, limits, launch, group, turn(frequencies, starts), first
        )

    def apart(
        self, stored: Sequence[Array]
    ) -> tuple[Sequence[Array], Array, Array, Int[Array, " spans"]]:
        """Return the other reader's arrays, the frequencies, the attention factor and the position
        of each span's first token.
        """
        first: int | Array = self.sink
        if self.shards > 1:
            *stored, shard = stored
            first = self.sink + shard * self.block
        *inner, frequencies, factor = stored
        return (
            inner,
            frequencies,
            factor,
            first
            + self._distances(
                SPAN * jnp.arange(stored[0].shape[2] * self.slots // SPAN, dtype=jnp.int32)
            ),
        )

    def _distances(self, tokens: Int[Array, " n"]) -> Int[Array, " n"]:
        """Return the distance of each token from the shard's first one."""
        if self.shards == 1:
            return tokens
        return tokens // self.block * (self.block * self.shards) + tokens % self.block

    def opened_arrays(self, refs: Sequence[Any], asm: bool) -> Sequence[Any]:
        *inner, cosines, sines = refs
        return (*self.inner.opened_arrays(inner, asm), cosines, sines)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        *inner, cosines, sines = refs
        half, scores = self.chunks[0] // 2, []
        turned = [self._turned_back(query, tile, c, asm) for c in range(half)]
        rows = self.inner.rows(inner, tile, asm)
        for slot in range(self.slots):
            total = jnp.zeros((tile.size // self.slots, query[0].shape[1]), jnp.float32)
            for c in range(half):
                multiply = functools.partial(
                    self._dots, turned[c], cosines, sines, tile, slot, c, asm
                )
                # The condition is always true. At the top of the loop, loads would be copied to
                # shared memory again for each tile, or take half of all registers. Inside a
                # condition they stay at their use, and come from the first level of the cache.
                total = lax.cond(
                    tile.start >= 0,
                    multiply,
                    lambda total, *_: total,
                    total,
                    rows(slot, c),
                    rows(slot, half + c),
                )
            scores.append(total)
        return scores

    def _turned_back(
        self, query: Sequence[Any], tile: Tile, chunk: int, asm: bool
    ) -> tuple[Array, Array]:
        """Turn the queries of a chunk and of its partner back by the tile's start position."""
        first, second = query[0][chunk], query[0][self.chunks[0] // 2 + chunk]
        cos, sin = (
            jnp.broadcast_to(table[tile.offset(SPAN), chunk][None, :], first.shape)
            for table in query[1:]
        )
        first, second = rotated(first, second, cos, -sin, asm)
        return joined(first), joined(second)

    def _dots(
        self,
        q: tuple[Array, Array],
        cosines: Any,
        sines: Any,
        tile: Tile,
        slot: int,
        chunk: int,
        asm: bool,
        total: Array,
        first: Half,
        second: Half,
    ) -> Float[Array, "rows GP"]:
        """Add to `total` the queries times the keys of a chunk and of its partner, rotated by their
        distance from the start.
        """
        width = self.chunks[1]
        at = pl.ds(0, tile.size // SPAN), slot, slice(None), pl.ds(width * chunk, width)
        cos, sin = (table[at].reshape(tile.size // self.slots, width) for table in (cosines, sines))
        first, second = rotated(first, second, cos, sin, asm)
        return dot(joined(second), q[1], (1, 1)) + (dot(joined(first), q[0], (1, 1)) + total)

    def weigh(
        self,
        weights: SlotRows,
        refs: Sequence[Any],
        tile: Tile,
        sums: list[Float[Array, "W GP"]],
        asm: bool,
    ) -> list[Array]:
        raise NotImplementedError("values have no positions")


def angle_tables(
    frequencies: Float[Array, " half"], positions: Int[Array, " n"]
) -> tuple[Float16[Array, "n half"], Float16[Array, "n half"]]:
    """Return the cosines and sines of position * frequency, rounded to fp16."""
    cos, sin = cos_and_sin(positions, frequencies)
    return cos.astype(jnp.float16), sin.astype(jnp.float16)


def rotated(
    first: Half,
    second: Half,
    cos: Float16[Array, "rows W"],
    sin: Float16[Array, "rows W"],
    asm: bool,
) -> tuple[Half, Half]:
    """Return (first cos - second sin, second cos + first sin)."""
    if not asm:
        return by_halves(
            lambda x, y, cos, sin: (x * cos - y * sin, y * cos + x * sin), first, second, cos, sin
        )
    less = "{ .reg .b32 t; mul.rn.f16x2 t, $2, $4; neg.f16x2 t, t; fma.rn.f16x2 $0, $1, $3, t; }"
    more = "{ .reg .b32 t; mul.rn.f16x2 t, $1, $4; fma.rn.f16x2 $0, $2, $3, t; }"
    return half2(less, first, second, cos, sin), half2(more, first, second, cos, sin)


def turned_back(
    queries: QueriesAndPartners, angles: Sequence[Float16[Array, " W"]], asm: bool
) -> QueriesAndPartners:
    """Return (q cos + partner sin, partner cos - q sin). angles: cos and -sin."""
    cos, minus_sin = (jnp.broadcast_to(table[None, :], queries[0].shape) for table in angles)
    first, second = rotated(*queries, cos, minus_sin, asm)
    return joined(first), joined(second)
