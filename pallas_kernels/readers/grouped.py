"""Packed codes with a scale, and perhaps a zero, for each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16

from pallas_kernels.readers.base import Rows, Side
from pallas_kernels.readers.shared import add_up, by_slots, channel_statistic, dot, for_tokens, query_planes, token_statistic
from pallas_kernels.tiles.arithmetic import Half, joined, multiply_add, subtract_scale, subtract_scale_add
from pallas_kernels.tiles.layout import Planes
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.tiles.words import Words, read_words


@dataclasses.dataclass(frozen=True)
class Grouped(Side):
    """Packed codes with a scale, and perhaps a zero, for each group: value = (code - centre) * scale, or code * scale + zero.

    Stored arrays: int16 words of each plane set [B, K, S / slots, tiles * W]; scale and zero [B, K, H / group, S] (axis "channels") or
    [B, K, S / group, H] (axis "tokens"). 16-bit floats may come as uint16 that holds their bits; `scale_dtype` tells which.
    `centre` is None where a zero is stored. Groups over channels are whole chunks, groups over tokens whole spans, a power of two of them.
    """

    planes: Planes
    axis: Literal["channels", "tokens"]
    group: int
    centre: int | None
    scale_dtype: str = "float16"

    @property
    def slots(self) -> int:
        return self.planes.slots

    @property
    def chunks(self) -> tuple[int, int]:
        return self.planes.chunks, self.planes.width

    @property
    def _groups(self) -> int:
        return self.planes.channels // self.group

    def _group_chunks(self, group: int) -> range:
        per_group = self.group // self.planes.width
        return range(group * per_group, (group + 1) * per_group)

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        words, statistics = stored[: len(self.planes.sets)], stored[len(self.planes.sets) :]
        return (*words, *(by_slots(statistics, self.slots) if self.axis == "channels" else statistics))

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        p, (batch, heads, columns, _) = self.planes, q.shape
        planes = query_planes(q, p.chunks)
        if self.axis == "tokens":
            return (planes,)
        sums = jnp.sum(planes.astype(jnp.float32), axis=-1)  # [B, K, chunks, GP], of the rounded queries
        offsets = jnp.asarray([[p.field(a, c).bias + (self.centre or 0) for c in range(p.chunks)] for a in range(p.slots)], jnp.float32)
        grouped = (batch, heads, p.slots, self._groups, p.chunks // self._groups, columns)
        start = -jnp.sum((offsets[None, None, :, :, None] * sums[:, :, None]).reshape(grouped), axis=4)
        if self.centre is not None:
            return planes, start
        return planes, start, jnp.sum(sums.reshape(batch, heads, self._groups, p.chunks // self._groups, columns), axis=3)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        words, scale, zero = self._open(refs, tile, 1, asm)
        q = [query[0][c] for c in range(self.planes.chunks)]
        found = []
        for slot in range(self.slots):
            if self.axis == "channels":
                found.append(self._partial_scores(words, q, query[1:], slot, scale, zero, tile, asm))
            else:
                values = (joined(self._values(words, scale, zero, slot, c, tile, asm)) for c in range(self.planes.chunks))
                # all dots before their sum: the other way round ptxas takes fewer registers, and more instructions
                found.append(add_up([dot(value, q[c], (1, 1)) for c, value in enumerate(values)]))
        return found

    def _partial_scores(self, words: Words, q: list[Array], start: Any, slot: int, scale: Any, zero: Any, tile: Tile, asm: bool) -> Array:
        """A scale multiplies a partial dot product of a whole group; the biases of its codes are that product's initial value."""
        total = None
        for group in range(self._groups):
            part = jnp.broadcast_to(start[0][slot, group][None, :], (tile.size // self.slots, q[0].shape[0]))
            for c in self._group_chunks(group):
                part = dot(joined(words.codes(self.planes.field(slot, c))), q[c], (1, 1)) + part
            s = self._token_statistic(scale, group, slot, tile).astype(jnp.float32)[:, None]
            total = part * s if total is None else multiply_add(part, s, total, asm)
            if zero is not None:
                z = self._token_statistic(zero, group, slot, tile).astype(jnp.float32)[:, None]
                total = multiply_add(z, start[1][group][None, :], total, asm)
        assert total is not None
        return total

    def weigh(self, weights: Rows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool) -> list[Array]:
        words, scale, zero = self._open(refs, tile, 0, asm)
        for slot, w in enumerate(weights):
            half = w.astype(jnp.float16)
            for c in range(self.planes.chunks):
                values = self._values(words, scale, zero, slot, c, tile, asm)
                sums[c] = sums[c] + dot(joined(values), half, (0, 0))
        return sums

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        words, scale, zero = self._open(refs, tile, 1, asm)
        return lambda slot, chunk: self._values(words, scale, zero, slot, chunk, tile, asm)

    def _open(self, refs: Sequence[Any], tile: Tile, axis: int, asm: bool) -> tuple[Words, Any, Any]:
        """(words, scale ref, zero ref or None)."""
        sets = len(self.planes.sets)
        return read_words(refs, self.planes, tile, axis, asm), refs[sets], refs[sets + 1] if self.centre is None else None

    def _values(self, words: Words, scale: Any, zero: Any, slot: int, chunk: int, tile: Tile, asm: bool) -> Half:
        """The values [rows, W] of a chunk in fp16."""
        field = self.planes.field(slot, chunk)
        h, bias = words.codes(field), field.bias
        if self.axis == "channels":
            group = chunk * self.planes.width // self.group
            s = self._token_statistic(scale, group, slot, tile)[:, None]
            z = None if zero is None else self._token_statistic(zero, group, slot, tile)[:, None]
        else:
            s = self._channel_statistic(scale, chunk, tile)
            z = None if zero is None else self._channel_statistic(zero, chunk, tile)
        s = jnp.broadcast_to(s, h.shape)
        if z is None:
            return subtract_scale(h, bias + (self.centre or 0), s, asm)
        return subtract_scale_add(h, bias, s, jnp.broadcast_to(z, h.shape), asm)

    def _token_statistic(self, ref: Any, group: int, slot: int, tile: Tile) -> Float16[Array, " rows"]:
        return token_statistic(ref, group, self.slots, slot, tile, self.scale_dtype).astype(jnp.float16)

    def _channel_statistic(self, ref: Any, chunk: int, tile: Tile) -> Float16[Array, "rows W"]:
        found = channel_statistic(ref, self.planes, chunk, tile, self.group, self.scale_dtype)
        return for_tokens(found, tile.size // self.slots)
