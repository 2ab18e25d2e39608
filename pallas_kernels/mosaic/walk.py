"""The shares of schedule.py in scalars, which is all that a block computes with here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.schedule import Schedule, TileRun


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of one program. `limits` may be a ref or an array."""

    schedule: Schedule
    limits: Any

    def _tiles(self, row: Any) -> jax.Array:
        tiles = pl.cdiv(self.limits[row], self.schedule.tile)
        return tiles - self._skipped(row) if self.schedule.lower else tiles

    def _skipped(self, row: Any) -> jax.Array:
        """Return the tiles before the one that holds a row's lower limit."""
        return lax.div(self._lower(row), jnp.int32(self.schedule.tile))

    def _lower(self, row: Any) -> jax.Array:
        return self.limits[self.schedule.batch + row]

    def total(self) -> jax.Array:
        """Return the number of all tiles."""
        heads = self.schedule.heads
        return lax.fori_loop(
            0, self.schedule.batch, lambda row, sum: sum + heads * self._tiles(row), jnp.int32(0)
        )

    def share(self, program: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `Schedule.share` of these limits."""
        total = self.total()
        per = self.schedule.per_program(total)
        return jnp.minimum(program * per, total), jnp.minimum((program + 1) * per, total)

    def run(self, at: jax.Array, end: jax.Array) -> TileRun:
        """Return `Schedule.run` of these limits."""
        heads = self.schedule.heads

        def look(row: jax.Array, found: Any) -> Any:
            here, begin, passed = found
            after = passed + heads * self._tiles(row)
            inside = (passed <= at) & (at < after)
            return jnp.where(inside, row, here), jnp.where(inside, passed, begin), after

        none = jnp.int32(0)
        row, begin, _ = lax.fori_loop(0, self.schedule.batch, look, (none, none, none))
        count = self._tiles(row)
        head = lax.div(at - begin, jnp.maximum(count, 1))
        first = at - begin - head * count
        stop = jnp.minimum(count, first + end - at)
        if not self.schedule.lower:
            return TileRun(row, head, first, stop, self.limits[row])
        skipped = self._skipped(row)
        lower = self._lower(row)
        return TileRun(row, head, skipped + first, skipped + stop, self.limits[row], lower)

    def pieces_of(self, number: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `Schedule.pieces_of` these limits."""
        heads, none = self.schedule.heads, jnp.int32(0)

        def look(row: jax.Array, sums: Any) -> Any:
            total, before = sums
            tiles = heads * self._tiles(row)
            return total + tiles, before + jnp.where(row < number, tiles, 0)

        total, start = lax.fori_loop(0, self.schedule.batch, look, (none, none))
        count, per = self._tiles(number), self.schedule.per_program(total)
        start += head * count
        first = lax.div(start, per)
        end = jnp.where(count > 0, lax.div(start + count - 1, per) + 1, first)
        unit = number * heads + head
        return first + unit, end + unit

    def for_each_run(self, program: jax.Array, read: Callable[[TileRun, jax.Array], None]) -> None:
        """Call `read` with each run of a program's share, and with the place of its piece."""
        begin, end = self.share(program)

        def read_run(at: jax.Array) -> jax.Array:
            run = self.run(at, end)
            read(run, program + run.row * self.schedule.heads + run.head)
            return at + run.end - run.first

        lax.while_loop(lambda at: at < end, read_run, begin)
