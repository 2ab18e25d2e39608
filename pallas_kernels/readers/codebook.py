"""Read codes that index a codebook, the `table`: KVQuant's non-uniform formats and NormalFloat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.outlier_values import outlier_values
from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import LoopStep, Reader, SlotRows
from pallas_kernels.readers.shared import LOG2E, add_up, by_slots, dot, query_planes, token_scale
from pallas_kernels.readers.sparse_outliers import outlier_scores
from pallas_kernels.readers.turn import TurnTables
from pallas_kernels.tiles.arithmetic import half_multiply_add, multiply_add
from pallas_kernels.tiles.halves import Half, joined
from pallas_kernels.tiles.layout import PlaneLayout
from pallas_kernels.tiles.table_lookup import LookedUp, LookupTable
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.tiles.words import read_words


@dataclasses.dataclass(frozen=True)
class CodebookReader(Reader):
    """value = scale * table[code] + zero, plus a residual if that channel of the token is an
    outlier.

    Stored arrays: int16 words of each plane set [B, K, S / slots, tiles * W]; the table [2^bits],
    of 2, 3 or 4 bits; scale and zero:

        affine "channels"   [K, H], of a channel, the same for all tokens and sequences
        affine "tokens"     [B, K, H / group, S], or [B, 1, H / group, S] if all heads share them;
                            16-bit floats may be uint16 that holds the bits

    With outliers, in pools of `pool` tokens (readers/sparse_outliers.py), also: index [B, S / pool,
    P] uint16, residual [B, S / pool, P], and ends [B, S / pool, K] uint16.

    The table is rounded to fp16, and so are queries times the scales of channels. No element is
    multiplied: a channel's scale and zero point are applied to the query, a token's scale to its
    score or to its weight, and a token's zero point adds to all channels of the group. Only values
    with scales of channels are computed one by one.
    """

    layout: PlaneLayout
    affine: Literal["channels", "tokens"]
    group: int
    scale_dtype: str = "float16"
    pool: int = 0

    @property
    def slots(self) -> int:
        return self.layout.slots

    @property
    def chunks(self) -> tuple[int, int]:
        return self.layout.chunks, self.layout.width

    @property
    def row_bytes(self) -> int:
        return self.layout.bits * self.layout.channels // 8

    @property
    def step(self) -> LoopStep:
        # among 16 entries: in array operations a tree of 15 for each two elements
        selects = self.layout.bits == 4
        return LoopStep(8192 // self.layout.channels, 2 if selects else 3, crowded=selects)

    @property
    def _sets(self) -> int:
        return len(self.layout.sets)

    @property
    def _groups(self) -> list[range]:
        """Return the chunks of each group of channels."""
        if self.affine == "channels":
            return [range(self.layout.chunks)]
        per_group = self.group // self.layout.width
        return [range(c, c + per_group) for c in range(0, self.layout.chunks, per_group)]

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        words, table = stored[: self._sets], stored[self._sets]
        scales = list(stored[self._sets + 1 :][:2])
        entries, wanted = 1 << self.layout.bits, self._sets + (6 if self.pool else 3)
        if table.shape != (entries,) or len(stored) != wanted:
            raise ValueError(
                f"{table.shape=} among {len(stored)} arrays: the table has {entries} entries, and"
                f" {wanted} arrays are needed"
            )
        scales = (
            [s.astype(jnp.float16)[None] for s in scales]
            if self.affine == "channels"
            else by_slots(scales, self.slots)
        )
        return (*words, table[None, None], *scales)

    def opened_arrays(self, refs: Sequence[Any], asm: bool) -> Sequence[Any]:
        table = LookupTable.read(refs[self._sets], asm)
        return (*refs[: self._sets], table, *refs[self._sets + 1 :])

    @property
    def weight_exponent(self) -> int:
        # Times a token's scale, a larger weight would leave the range of fp16.
        return 0 if self.affine == "tokens" else super().weight_exponent

    @property
    def adds_scores(self) -> bool:
        return self.pool > 0

    @property
    def adds_values(self) -> bool:
        return self.pool > 0

    def more_values(
        self,
        scores: Float[Array, "B k R S"],
        stored: Sequence[Array],
        limits: Int[Array, " B"],
        launch: Launch,
        first: int = 0,
    ) -> list[Pieces]:
        if not self.pool:
            return []
        index, residual, ends = stored[-3:]
        return [
            outlier_values(
                scores,
                index,
                residual,
                ends,
                limits,
                self.layout.channels,
                first=first,
                launch=launch,
            )
        ]

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
        index, residual, ends = stored[-3:]
        if not self.pool:
            return None
        return outlier_scores(
            q, index, residual, ends, limits, turned, launch, self.pool, group, first
        )

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        if self.affine == "channels":
            scale, zero = (
                s.astype(jnp.float32)[None, :, None] for s in stored[self._sets + 1 :][:2]
            )
            offset = jnp.sum(q * zero, axis=-1) * (LOG2E * self.layout.channels**-0.5)
            return query_planes(q * scale, self.layout.chunks), offset
        planes = query_planes(q, self.layout.chunks)
        # [B, K, chunks, GP], of the rounded queries
        sums = jnp.sum(planes.astype(jnp.float32), axis=-1)
        batch, heads, _, columns = sums.shape
        return planes, jnp.sum(sums.reshape(batch, heads, len(self._groups), -1, columns), axis=3)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        looked_up, scores = self._look_up(refs, tile, 1, asm), []
        for slot in range(self.slots):
            total = None
            for group, chunks in enumerate(self._groups):
                part = add_up(
                    dot(joined(looked_up.plane(slot, c)), query[0][c], (1, 1)) for c in chunks
                )
                if self.affine == "channels":
                    total = part + query[1][...][None, :]
                    continue
                scale, zero = (s[:, None] for s in self._of_tokens(refs, group, slot, tile))
                part = multiply_add(zero, query[1][group][None, :], part * scale, asm)
                total = part if total is None else total + part
            assert total is not None
            scores.append(total)
        return scores

    def weigh(
        self, weights: SlotRows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool
    ) -> list[Array]:
        looked_up, sums = self._look_up(refs, tile, 0, asm), list(sums)
        for slot, w in enumerate(weights):
            for group, chunks in enumerate(self._groups):
                if self.affine == "channels":
                    scaled, shift = w, jnp.zeros((), jnp.float32)
                else:
                    scale, zero = (s[:, None] for s in self._of_tokens(refs, group, slot, tile))
                    # The zero point adds the same to all channels of the group.
                    scaled, shift = w * scale, jnp.sum(w * zero, axis=0)[None, :]
                half = scaled.astype(jnp.float16)
                for c in chunks:
                    values = looked_up.plane(slot, c)
                    if self.affine == "channels":
                        values = self._affine(values, refs, slot, c, tile, asm)
                    sums[c] = sums[c] + shift + dot(joined(values), half, (0, 0))
        return sums

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        looked_up = self._look_up(refs, tile, 1, asm)
        return lambda slot, chunk: self._affine(
            looked_up.plane(slot, chunk), refs, slot, chunk, tile, asm
        )

    def _look_up(self, refs: Sequence[Any], tile: Tile, axis: int, asm: bool) -> LookedUp:
        return LookedUp.of(
            read_words(refs, self.layout, tile, axis, asm), self.layout, refs[self._sets]
        )

    def _affine(
        self, entries: Half, refs: Sequence[Any], slot: int, chunk: int, tile: Tile, asm: bool
    ) -> Half:
        if self.affine == "channels":
            at = slice(self.layout.width * chunk, self.layout.width * (chunk + 1))
            scale, zero = (s[at][None, :] for s in refs[self._sets + 1 :][:2])
        else:
            group = next(i for i, chunks in enumerate(self._groups) if chunk in chunks)
            scale, zero = (
                s.astype(jnp.float16)[:, None] for s in self._of_tokens(refs, group, slot, tile)
            )
        scale, zero = (jnp.broadcast_to(s, entries.shape) for s in (scale, zero))
        return half_multiply_add(entries, scale, zero, asm)

    def _of_tokens(
        self, refs: Sequence[Any], group: int, slot: int, tile: Tile
    ) -> tuple[Array, Array]:
        scale, zero = (
            token_scale(ref, group, self.slots, slot, tile, self.scale_dtype)
            for ref in refs[self._sets + 1 :][:2]
        )
        return scale.astype(jnp.float32), zero.astype(jnp.float32)
