"""Codes that stand for the entries of a table: non-uniform codebooks.

    instructions per element                    jnp            asm
    2 / 3 / 4 bits, one table                   7 / 13 / 23    3.5 / 4.5 / 6.5    (+ 0.5 for scaled values)
    2 / 3 / 4 bits, a table for each channel    7 / 13 / 23    3.5 / 6.5 / 11.5

Counted from the formulation for one channel of one token, without loads and dots. Tables of 16 entries for each channel do not fit the
registers: they compile to two to four times these numbers (docs/kernels.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16

from pallas_kernels.lookup import Words, byte_planes, chosen, code_bits, permuted
from pallas_kernels.parts import add_up, by_slots, dot, query_planes, token_statistic
from pallas_kernels.planes import Planes, multiply_add
from pallas_kernels.sides import Rows, Side
from pallas_kernels.tile import Tile


@dataclasses.dataclass(frozen=True)
class Codebook(Side):
    """value = table[code] * scale + zero, scale and zero of a token and a group of channels (or no scale and zero at all).

    Stored arrays: int16 words of each plane set [B, K, S / slots, tiles * W]; the table, [entries], or [entries, H] where `per_channel`,
    shared by all heads or with a leading axis [K]; scale and zero [B, K, H / group, S] unless `group` is None. 2^bits entries; they become
    fp16, so do the products with a scale. 16-bit statistics may come as uint16 that holds their bits.

    A scale and an offset of a *channel* that no token changes need no table per channel, and no work here: multiply q by the scale before,
    or the weighted values after, and add q . offset to m, or l * offset to o (decode.Part).
    """

    planes: Planes
    per_channel: bool = False
    group: int | None = None
    scale_dtype: str = "float16"

    @property
    def slots(self) -> int:
        return self.planes.slots

    @property
    def chunks(self) -> tuple[int, int]:
        return self.planes.chunks, self.planes.width

    @property
    def _sets(self) -> int:
        return len(self.planes.sets)

    @property
    def _permutes(self) -> bool:
        """Whether assembly reads the table with `permuted`."""
        return not self.per_channel and self.planes.bits > 2

    @property
    def _groups(self) -> list[range]:
        """The chunks of each group of channels."""
        per_group = (self.group or self.planes.channels) // self.planes.width
        return [range(c, c + per_group) for c in range(0, self.planes.chunks, per_group)]

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        words, table, statistics = stored[: self._sets], stored[self._sets], stored[self._sets + 1 :]
        own = (1 << self.planes.bits, *([self.planes.channels] if self.per_channel else []))
        if table.shape[-len(own) :] != own or table.ndim > len(own) + 1 or len(statistics) != (0 if self.group is None else 2):
            raise ValueError(f"{table.shape=} and {len(statistics)=}: the table is {own} or [K, *{own}], scale and zero come with a group")
        lead = words[0].shape[:2]
        table = table.astype(jnp.float16).reshape(*([1] * (2 + len(own) - table.ndim)), *table.shape)
        table = jnp.broadcast_to(table, (*lead, *own))
        return (*words, table, *by_slots(statistics, self.slots), *([byte_planes(table)] if self._permutes else []))

    def query(self, q: Float[Array, "B K GP H"]) -> tuple[Array, ...]:
        planes = query_planes(q, self.planes.chunks)
        if self.group is None:
            return (planes,)
        sums = jnp.sum(planes.astype(jnp.float32), axis=-1)  # [B, K, chunks, GP], of the rounded queries
        batch, heads, _, columns = sums.shape
        return planes, jnp.sum(sums.reshape(batch, heads, len(self._groups), -1, columns), axis=3)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        words, found = Words.read(refs, self.planes, tile), []
        for slot in range(self.slots):
            total = None
            for group, chunks in enumerate(self._groups):
                part = add_up(dot(self._entries(words, refs, slot, c, asm), query[0][c], (1, 1)) for c in chunks)
                if self.group is None:
                    total = part
                    continue
                scale, zero = (s[:, None] for s in self._statistics(refs, group, slot, tile))
                part = multiply_add(zero, query[1][group][None, :], part * scale, asm)
                total = part if total is None else total + part
            assert total is not None
            found.append(total)
        return found

    def weigh(self, weights: Rows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool) -> list[Array]:
        words, sums = Words.read(refs, self.planes, tile), list(sums)
        for slot, w in enumerate(weights):
            half = w.astype(jnp.float16)
            for group, chunks in enumerate(self._groups):
                scale = zero = None
                if self.group is not None:
                    scale, zero = self._statistics(refs, group, slot, tile)
                for c in chunks:
                    values = self._entries(words, refs, slot, c, asm)
                    if scale is not None:
                        values = values * scale.astype(jnp.float16)[:, None]
                    sums[c] = sums[c] + dot(values, half, (0, 0))
                if zero is not None:  # adds the same to all channels of the group
                    shift = jnp.sum(w * zero[:, None], axis=0)[None, :]
                    for c in chunks:
                        sums[c] = sums[c] + shift
        return sums

    def _entries(self, words: Words, refs: Sequence[Any], slot: int, chunk: int, asm: bool) -> Float16[Array, "rows W"]:
        table, width, bits = refs[self._sets], self.planes.width, code_bits(self.planes, slot, chunk)
        count = 1 << self.planes.bits
        if asm and self._permutes:
            return permuted(words, bits, [refs[-1][i] for i in range(count // 2)])
        if self.per_channel:
            entries = [table[e, pl.ds(width * chunk, width)][None, :] for e in range(count)]
        else:
            entries = [table[e] for e in range(count)]
        return chosen(words, bits, entries, asm)

    def _statistics(self, refs: Sequence[Any], group: int, slot: int, tile: Tile) -> tuple[Array, Array]:
        scale, zero = (token_statistic(ref, group, self.slots, slot, tile, self.scale_dtype) for ref in refs[self._sets + 1 :][:2])
        return scale.astype(jnp.float32), zero.astype(jnp.float32)
