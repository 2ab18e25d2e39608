"""Share the live tiles of a ragged batch among a fixed number of programs, by the rows' lengths, on
the device.

    unit u = row * heads + head    has    tiles_u = ceil(limits[row] / tile)  tiles
    the tiles of all units, in order, are numbered 0 .. T - 1
    program p                      reads  tiles  p * per .. min((p + 1) * per, T) - 1,
                                          per = max(MIN_TILES, ceil(T / programs))

So no program reads more than its share, however much the lengths differ. The time of a batch
follows from its live tokens, not from its capacity or its longest row. A program that reads tiles
of several units writes a piece for each: piece p + u. The pieces of one unit are adjacent, and
their places follow from the lengths alone, so the kernel that merges them needs no table.

A row with a window has a lower limit too, and its tiles begin with the one that holds the first
token inside. A row whose body is a ring has two segments, which take the place of rows here
(lower_limits.py).

Pallas is imported by the functions that call it: the library knows this file's types, and importing
Pallas takes a third of the time that importing JAX takes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MIN_TILES = 2  # tiles per program: nothing is computed until its first one has arrived
FEWEST_PIECES = 4


class TileRun(NamedTuple):
    """Neighbouring tiles of one unit that a program reads: first <= tile < end, of a row's first
    `limit` tokens, without those before `lower` if it is given.
    """

    row: Int[Array, ""]
    head: Int[Array, ""]
    first: Int[Array, ""]
    end: Int[Array, ""]
    limit: Int[Array, ""]
    lower: Int[Array, ""] | None = None

    def whole(self, size: int, end: Int[Array, ""]) -> tuple[Int[Array, ""] | int, Int[Array, ""]]:
        """Return (skipped, whole): tiles of `size` tokens from first + skipped to first + whole
        count as a whole, if those before `end` lie before the limit. At most one is skipped: the
        tile that holds the lower limit.
        """
        whole = end - self.first
        if self.lower is None:
            return 0, whole
        skipped = jnp.clip(self.lower - self.first * size, 0, 1)
        return skipped, jnp.maximum(whole, skipped)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A division of the tiles of a batch among programs.

    Args:
        programs: of the launch, no more than run at a time.
        tile: tokens of a tile.
        batch: rows, or all segments of rows.
        heads: KV heads.
        segments: of each row, neighbours in the batch.
        lower: behind the limits [batch] come as many lower limits.
    """

    programs: int
    tile: int
    batch: int
    heads: int
    segments: int = 1
    lower: bool = False

    @property
    def rows(self) -> int:
        return self.batch // self.segments

    @property
    def units(self) -> int:
        return self.batch * self.heads

    @property
    def pieces(self) -> int:
        """Return how many places there are for pieces. Not all of them are used.

        There is one for each warp of Mosaic GPU's merge (mosaic/merge.py), which loads as many at a
        time.
        """
        return max(self.programs + self.units, FEWEST_PIECES)

    @property
    def usual_pieces(self) -> int:
        """Return the number of pieces of a unit if all rows are equally long. The first and the
        last may be short.
        """
        return -(-self.programs // self.units) + 1

    def per_program(self, total: Int[Array, ""]) -> Int[Array, ""]:
        """Return how many of `total` tiles a program reads at most."""
        from jax.experimental import pallas as pl

        return jnp.maximum(pl.cdiv(total, self.programs), MIN_TILES)

    def tiles(
        self, limits_ref: Any
    ) -> tuple[Int[Array, " rows"], Int[Array, " rows"], Int[Array, " rows"]]:
        """Read (row number, limit, tiles of one head) of each row, padded with empty rows to a
        power of two.
        """
        from jax.experimental import pallas as pl

        row = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(self.batch),), 0)
        limits = jnp.where(row < self.batch, limits_ref[jnp.minimum(row, self.batch - 1)], 0)
        tiles = pl.cdiv(limits, self.tile)
        if self.lower:
            tiles -= lax.div(self._lower(limits_ref, row), jnp.int32(self.tile))
        return row, limits, tiles

    def _lower(self, limits_ref: Any, row: Int[Array, " rows"]) -> Int[Array, " rows"]:
        last = self.batch - 1
        return jnp.where(row <= last, limits_ref[self.batch + jnp.minimum(row, last)], 0)

    def share(
        self, limits_ref: Any, program: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return (first, end) of a program's tiles among all tiles."""
        total = self.heads * jnp.sum(self.tiles(limits_ref)[2])
        per = self.per_program(total)
        return jnp.minimum(program * per, total), jnp.minimum((program + 1) * per, total)

    def run(self, limits_ref: Any, at: Int[Array, ""], end: Int[Array, ""]) -> TileRun:
        """Return the tiles from number `at` < T on, up to `end` or to the end of their unit."""
        row, limits, tiles = self.tiles(limits_ref)
        ends = self.heads * (jnp.cumsum(tiles) if self.batch > 1 else tiles)
        before = ends <= at
        here = jnp.sum(before.astype(jnp.int32))
        count, limit = (jnp.sum(jnp.where(row == here, numbers, 0)) for numbers in (tiles, limits))
        place = at - jnp.max(jnp.where(before, ends, 0))
        head = lax.div(place, jnp.maximum(count, 1))
        first = place - head * count
        stop = jnp.minimum(count, first + end - at)
        if not self.lower:
            return TileRun(here, head, first, stop, limit)
        lower = jnp.sum(jnp.where(row == here, self._lower(limits_ref, row), 0))
        skipped = lax.div(lower, jnp.int32(self.tile))
        return TileRun(here, head, skipped + first, skipped + stop, limit, lower)

    def for_each_run(
        self, limits_ref: Any, read: Callable[[TileRun, Callable[[], Array]], None]
    ) -> None:
        """Call `read` with each run of this program's share, and with a function that returns the
        place of its piece.

        A kernel calls that function after it has read the run, so that the place takes no register
        meanwhile.
        """
        from jax.experimental import pallas as pl

        program = pl.program_id(0)
        begin, end = self.share(limits_ref, program)

        def read_run(at: Array) -> Array:
            run = self.run(limits_ref, at, end)
            read(run, lambda: program + run.row * self.heads + run.head)
            return at + run.end - run.first

        lax.while_loop(lambda at: at < end, read_run, begin)

    def pieces_of(
        self, limits_ref: Any, number: Int[Array, ""], head: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return (first, end) of the places of a unit's pieces."""
        row, _, tiles = self.tiles(limits_ref)
        per = self.per_program(self.heads * jnp.sum(tiles))
        count = jnp.sum(jnp.where(row == number, tiles, 0))
        start = self.heads * jnp.sum(jnp.where(row < number, tiles, 0)) + head * count
        unit = number * self.heads + head
        first = lax.div(start, per)
        return first + unit, jnp.where(count > 0, lax.div(start + count - 1, per) + 1, first) + unit


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["m", "l", "o", "limits"],
    meta_fields=["schedule"],
)
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Attention over the tiles that each program read of each unit, in the form of `Splits`. There
    are P = schedule.pieces places, and some are unused.
    """

    m: Float[Array, "P R"]
    l: Float[Array, "P R"]
    o: Float[Array, "P H R"]
    limits: Int[Array, " L"]
    schedule: Schedule


@dataclasses.dataclass(frozen=True)
class Unit:
    """An array [B, K, ...] in memory at one row and head, indexed by its other axes.

    Either leading axis may be shorter if neighbours share an entry, as segments of a row do. This
    replaces a block of the array for a row that is only known when the kernel runs.
    """

    ref: Any
    row: Int[Array, ""]
    head: Int[Array, ""]
    schedule: Schedule

    @property
    def _place(self) -> tuple[Any, Any]:
        sizes = zip(
            (self.row, self.head),
            self.ref.shape[:2],
            (self.schedule.batch, self.schedule.heads),
            strict=True,
        )
        first, second = (
            0 if size == 1 else at if size == whole else lax.div(at, jnp.int32(whole // size))
            for at, size, whole in sizes
        )
        return first, second

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape[2:]

    @property
    def dtype(self) -> Any:
        return self.ref.dtype

    @property
    def at(self) -> _At:
        return _At(self)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.ref[self.place(index)]

    def place(self, index: Any) -> tuple[Any, ...]:
        """Return the index into the whole array."""
        return (*self._place, *(index if isinstance(index, tuple) else (index,)))


@dataclasses.dataclass(frozen=True)
class _At:
    """The result of `Unit.at`, for masked loads and stores."""

    unit: Unit

    def __getitem__(self, index: Any) -> Any:
        # Pallas asks indices for their shape.
        place = (jnp.int32(at) if isinstance(at, int) else at for at in self.unit.place(index))
        return self.unit.ref.at[tuple(place)]
