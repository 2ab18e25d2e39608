"""Read packed codes with a scale, and perhaps a zero point, for each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16

from pallas_kernels.readers.base import LoopStep, Reader, SlotRows
from pallas_kernels.readers.shared import (
    add_up,
    by_slots,
    channel_scale,
    dot,
    dot_reordered,
    for_tokens,
    query_planes,
    token_scale,
)
from pallas_kernels.tiles.arithmetic import multiply_add, subtract_scale, subtract_scale_add
from pallas_kernels.tiles.halves import Half, joined
from pallas_kernels.tiles.layout import PlaneLayout
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.tiles.words import WordTiles, read_words

# (tokens of a step, stages) by head dim and code bits, for codes without and with a zero point.
# They are the most that a program's 255 registers hold without spilling in the loop, counted from
# machine code (docs/kernels.md). Larger steps leave fewer loads that are not asynchronous.
_STEPS = {
    (128, 2): ((128, 3), (128, 3)),
    (128, 3): ((128, 2), (64, 3)),
    (128, 4): ((128, 3), (64, 3)),
    (128, 5): ((64, 3), (64, 3)),
    (128, 8): ((64, 2), (64, 2)),
    (256, 2): ((64, 3), (64, 3)),
    (256, 3): ((32, 3), (32, 3)),
    (256, 4): ((32, 3), (32, 3)),
    (256, 5): ((32, 3), (32, 3)),
    (256, 8): ((32, 2), (32, 2)),
}


@dataclasses.dataclass(frozen=True)
class GroupedReader(Reader):
    """Packed codes with a scale, and perhaps a zero point, for each group: value = (code - centre)
    * scale, or code * scale + zero.

    Stored arrays: int16 words of each plane set [B, K, S / slots, tiles * W]; scale and zero [B, K,
    H / group, S] (axis "channels") or [B, K, S / group, H] (axis "tokens"). 16-bit floats may be
    uint16 that holds the bits of `scale_dtype`. `centre` is None if a zero point is stored. Groups
    over channels are whole chunks. Groups over tokens are whole spans, a power of two of them.
    """

    layout: PlaneLayout
    axis: Literal["channels", "tokens"]
    group: int
    centre: int | None
    scale_dtype: str = "float16"

    @property
    def slots(self) -> int:
        return self.layout.slots

    @property
    def chunks(self) -> tuple[int, int]:
        return self.layout.chunks, self.layout.width

    @property
    def row_bytes(self) -> int:
        scales = 2 if self.centre is None else 1
        return (
            self.layout.bits * self.layout.channels // 8
            + scales * 2 * self.layout.channels // self.group
        )

    @property
    def step(self) -> LoopStep:
        tile, stages = _STEPS.get((self.layout.channels, self.layout.bits), ((128, 3), (128, 3)))[
            self.centre is None
        ]
        # Two groups of 64 with zero points spill in the loop. One of them does not, nor do four of
        # 32.
        halved = self.axis == "tokens" and self.group == 64 and self.centre is None
        return LoopStep(min(tile, 64) if halved else tile, stages)

    @property
    def _groups(self) -> int:
        return self.layout.channels // self.group

    def _group_chunks(self, group: int) -> range:
        per_group = self.group // self.layout.width
        return range(group * per_group, (group + 1) * per_group)

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        words, scales = stored[: len(self.layout.sets)], stored[len(self.layout.sets) :]
        return (*words, *(by_slots(scales, self.slots) if self.axis == "channels" else scales))

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        return (query_planes(q, self.layout.chunks),)

    def opened(self, query: Sequence[Any]) -> Sequence[Any]:
        if self.axis == "tokens":
            return query
        p, planes = self.layout, query[0]
        # of the rounded queries
        sums = [jnp.sum(planes[c].astype(jnp.float32), axis=1) for c in range(p.chunks)]
        groups = [self._group_chunks(g) for g in range(self._groups)]
        offsets = [
            [p.field(a, c).bias + (self.centre or 0) for c in range(p.chunks)]
            for a in range(p.slots)
        ]
        starts = [
            [-add_up(of_slot[c] * sums[c] for c in chunks) for chunks in groups]
            for of_slot in offsets
        ]
        return planes, starts, [add_up(sums[c] for c in chunks) for chunks in groups]

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        words, scale, zero = self._open(refs, tile, 1, asm)
        q = [query[0][c] for c in range(self.layout.chunks)]
        scores = []
        for slot in range(self.slots):
            if self.axis == "channels":
                scores.append(
                    self._partial_scores(words, q, query[1:], slot, scale, zero, tile, asm)
                )
            else:
                values = (
                    joined(self._values(words, scale, zero, slot, c, tile, asm))
                    for c in range(self.layout.chunks)
                )
                multiply = dot if asm else dot_reordered
                products = (multiply(value, q[c], (1, 1)) for c, value in enumerate(values))
                # In assembly, all dots come before their sum: ptxas then takes more registers but
                # fewer instructions than the other way round. Array operations need more registers
                # than assembly and would spill in the loop.
                scores.append(add_up(list(products) if asm else products))
        return scores

    def _partial_scores(
        self,
        words: WordTiles,
        q: list[Array],
        start: Any,
        slot: int,
        scale: Any,
        zero: Any,
        tile: Tile,
        asm: bool,
    ) -> Array:
        """Scale partial dot products of whole groups. The product starts from the biases of the
        codes.
        """
        total = None
        for group in range(self._groups):
            part = jnp.broadcast_to(
                start[0][slot][group][None, :], (tile.size // self.slots, q[0].shape[0])
            )
            for c in self._group_chunks(group):
                part = dot(joined(words.codes(self.layout.field(slot, c))), q[c], (1, 1)) + part
            s = self._token_scale(scale, group, slot, tile).astype(jnp.float32)[:, None]
            total = part * s if total is None else multiply_add(part, s, total, asm)
            if zero is not None:
                z = self._token_scale(zero, group, slot, tile).astype(jnp.float32)[:, None]
                total = multiply_add(z, start[1][group][None, :], total, asm)
        assert total is not None
        return total

    def weigh(
        self, weights: SlotRows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool
    ) -> list[Array]:
        words, scale, zero = self._open(refs, tile, 0, asm)
        multiply = dot if asm or self.axis == "tokens" else dot_reordered
        for slot, w in enumerate(weights):
            half = w.astype(jnp.float16)
            for c in range(self.layout.chunks):
                values = self._values(words, scale, zero, slot, c, tile, asm)
                sums[c] = sums[c] + multiply(joined(values), half, (0, 0))
        return sums

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        words, scale, zero = self._open(refs, tile, 1, asm)
        return lambda slot, chunk: self._values(words, scale, zero, slot, chunk, tile, asm)

    def _open(
        self, refs: Sequence[Any], tile: Tile, axis: int, asm: bool
    ) -> tuple[WordTiles, Any, Any]:
        """Return (words, ref of scales, ref of zero points or None)."""
        sets = len(self.layout.sets)
        return (
            read_words(refs, self.layout, tile, axis, asm),
            refs[sets],
            refs[sets + 1] if self.centre is None else None,
        )

    def _values(
        self, words: WordTiles, scale: Any, zero: Any, slot: int, chunk: int, tile: Tile, asm: bool
    ) -> Half:
        """Dequantize a chunk: values [rows, W] in fp16."""
        field = self.layout.field(slot, chunk)
        h, bias = words.codes(field), field.bias
        if self.axis == "channels":
            group = chunk * self.layout.width // self.group
            s = self._token_scale(scale, group, slot, tile)[:, None]
            z = None if zero is None else self._token_scale(zero, group, slot, tile)[:, None]
        else:
            s = self._channel_scale(scale, chunk, tile)
            z = None if zero is None else self._channel_scale(zero, chunk, tile)
        s = jnp.broadcast_to(s, h.shape)
        if z is None:
            return subtract_scale(h, bias + (self.centre or 0), s, asm)
        return subtract_scale_add(h, bias, s, jnp.broadcast_to(z, h.shape), asm)

    def _token_scale(self, ref: Any, group: int, slot: int, tile: Tile) -> Float16[Array, " rows"]:
        return token_scale(ref, group, self.slots, slot, tile, self.scale_dtype).astype(jnp.float16)

    def _channel_scale(self, ref: Any, chunk: int, tile: Tile) -> Float16[Array, "rows W"]:
        scale = channel_scale(ref, self.layout, chunk, tile, self.group, self.scale_dtype)
        return for_tokens(scale, tile.size // self.slots)
