"""The tokens that one step of a kernel's loop reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tiles.layout import SPAN


@dataclasses.dataclass(frozen=True)
class Tile:
    """`size` tokens from `start` on.

    Args:
        size: tokens.
        start: the first token.
        index: start // size for a whole tile. Every offset is then the index times a constant,
            which tells the compiler that loads are aligned. None for the last tile of a split,
            which may start anywhere on a span.
        first: only tokens first <= token < limit count. None if all do.
        limit: see first.
        lower: tokens before it do not count either. It may lie inside a group, and `first` does
            not.
        part: the part that a step reads, as many neighbouring slots of a word row as any other
            part.
        parts: how many parts there are.
    """

    size: int
    start: Int[Array, ""]
    index: Int[Array, ""] | None
    first: Int[Array, ""] | None = None
    limit: Int[Array, ""] | None = None
    part: Int[Array, ""] | int = 0
    parts: int = 1
    lower: Int[Array, ""] | None = None

    def offset(self, unit: int) -> Int[Array, ""]:
        """Return the start in units of `unit` tokens. If a unit is longer than the tile, this is
        the number of the unit that holds the start.
        """
        if self.index is None:
            return self.start // unit
        if unit <= self.size:
            return self.index * (self.size // unit)
        return self.index // (unit // self.size)

    @property
    def masked(self) -> bool:
        """Return True if some tokens may not count."""
        return self.limit is not None

    def counts(self, tokens: Int[Array, "..."], length: int = 1) -> Bool[Array, "..."]:
        """Return a mask of the tokens that count, or of groups of `length` tokens that begin there
        and hold one that counts. Tokens are numbered from the tile's start.
        """
        if self.first is None or self.limit is None:
            return jnp.ones(tokens.shape, bool)
        at = self.start + tokens
        counts = (at >= self.first) & (at < self.limit)
        return counts if self.lower is None else counts & (at > self.lower - length)

    def slot_tokens(self, slots: int, slot: int) -> Int[Array, " rows"]:
        """Return the tokens, counted from the tile's start, in slot `slot` (of the part): a run of
        SPAN / slots in each span.
        """
        run = SPAN // slots
        row = lax.broadcasted_iota(jnp.int32, (self.size // slots,), 0)
        return row // run * SPAN + run * (self.part * (slots // self.parts) + slot) + row % run


def change_slots(
    rows: list[Float[Array, "rows G"]], slots: int
) -> list[Float[Array, "other_rows G"]]:
    """Rearrange rows of len(rows) token slots into `slots` token slots, for K and V that pack
    different numbers of tokens in a row.

    Kernels cannot slice or concatenate values, so masks choose the slots.
    """
    have = len(rows)
    if have == slots:
        return rows
    count, width = rows[0].shape
    spans, run = count * have // SPAN, SPAN // have
    joined = rows[0].reshape(spans, 1, run, width)
    if have > 1:
        number = lax.broadcasted_iota(jnp.int32, (1, have, 1, 1), 1)
        joined = sum(
            jnp.where(number == a, r.reshape(spans, 1, run, width), 0.0) for a, r in enumerate(rows)
        )
    split: Any = jnp.asarray(joined).reshape(spans, slots, SPAN // slots, width)
    if slots == 1:
        return [split.reshape(spans * SPAN, width)]
    number = lax.broadcasted_iota(jnp.int32, (1, slots, 1, 1), 1)
    return [
        jnp.sum(jnp.where(number == a, split, 0.0), axis=1).reshape(spans * SPAN // slots, width)
        for a in range(slots)
    ]
