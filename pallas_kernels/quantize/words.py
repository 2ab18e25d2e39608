"""Pack the codes of a unit of tokens into words, chunk by chunk (layout: tiles/layout.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.tiles.layout import PlaneLayout


def tokens_of_slot(layout: PlaneLayout, slot: int, tokens: int) -> Int[Array, " rows"]:
    """Return the tokens of a unit that share a slot, in the order of the rows of words."""
    run = layout.span // layout.slots
    row = lax.broadcasted_iota(jnp.int32, (tokens // layout.slots,), 0)
    return lax.div(row, run) * layout.span + slot * run + lax.rem(row, run)


class CodeWriter:
    """Packs codes of any width for some columns of every chunk, and stores them once they are
    complete.

    Args:
        layout: of the codes.
        words: refs [K, S / slots, tiles * W] of each plane set.
        head: the head to write.
        place: the unit's first token.
        first: the first column within a chunk.
        columns: how many columns of each chunk.
    """

    def __init__(
        self,
        layout: PlaneLayout,
        words: Sequence[Any],
        head: Any,
        place: Any,
        first: Any,
        columns: int,
    ):
        self._layout, self._refs, self._head = layout, words, head
        self._place, self._first, self._columns = place, first, columns
        self._words: dict[tuple[int, int], Array] = {}

    def add(self, slot: int, chunk: int, codes: Int[Array, "rows columns"]) -> None:
        """Add the int32 codes of the tokens of a slot."""
        low = 0
        for plane_set, bits in enumerate(self._layout.sets):
            field, tile = divmod(slot * self._layout.chunks + chunk, self._layout.tiles(bits))
            part = ((codes >> low) & ((1 << bits) - 1)) << (bits * field)
            before = self._words.get((plane_set, tile))
            self._words[plane_set, tile] = part if before is None else before | part
            low += bits

    def store(self) -> None:
        for (plane_set, tile), word in self._words.items():
            at = lax.div(self._place, self._layout.slots)
            rows = pl.ds(at, word.shape[0])
            columns = pl.ds(tile * self._layout.width + self._first, self._columns)
            self._refs[plane_set][self._head, rows, columns] = word.astype(jnp.int16)


class LevelWriter:
    """Fills the words of one row of tiles code by code, and stores each word once it is full."""

    def __init__(self, layout: PlaneLayout, store: Callable[[int, int, Array], None]):
        """Keep `store`, which is called with (plane set, tile, int16 words)."""
        self._layout, self._store = layout, store
        self._words: dict[tuple[int, int], tuple[Array, int]] = {}

    def add(self, slot: int, chunk: int, level: Array) -> None:
        """Add the codes of a chunk of a token slot, in the form of `Job.levels`."""
        p, field = self._layout, self._layout.field(slot, chunk)
        bits = lax.bitcast_convert_type(level, jnp.int32)
        low = p.sets[0]
        self._put(
            0,
            field.tile,
            bits,
            field.shift + field.position,
            ((1 << low) - 1) if len(p.sets) == 2 else None,
        )
        if field.high_tile is not None:
            self._put(1, field.high_tile, bits, field.high_shift + field.position, 1 << low)

    def _put(self, plane_set: int, tile: int, bits: Array, shift: int, mask: int | None) -> None:
        # Bits above the 16 of a word are dropped at the end.
        moved = (
            bits << shift
            if shift >= 0
            else lax.shift_right_logical(bits, jnp.full((), -shift, jnp.int32))
        )
        if mask is not None:
            moved = moved & np.int32(mask << shift if shift >= 0 else mask >> -shift)
        word, count = self._words.pop((plane_set, tile), (None, 0))
        word = moved if word is None else word | moved
        if count + 1 == 16 // self._layout.sets[plane_set]:
            self._store(plane_set, tile, word.astype(jnp.int16))
        else:
            self._words[plane_set, tile] = word, count + 1
