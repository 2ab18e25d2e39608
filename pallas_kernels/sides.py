"""Hooks of the decode-attention skeleton: what turns the stored arrays of one side of a cache into scores, or into weighted values.

A side is static. Keys and values are independent: any side serves as either. A hook is called once for each tile of tokens, reads the
arrays where they lie and leaves nothing in memory.

                        scores of a tile                                  weighted values of a tile
    grouped, channels   sum_g s_g (q_g . c_g) + z_g sum(q_g)              p . (c s + z), s and z of a token and a group of channels
    grouped, tokens     q . (c s + z), s and z of a channel               p . (c s + z), s and z of a channel
    dense               q . k                                             p . v

Token-major tiles meet the query heads of a KV head as the N columns of a tensor-core dot, N = 8 for up to 8 heads: half the work of the
usual M = 16 rows, most of which would be padding.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, Int

from pallas_kernels._launch import Launch
from pallas_kernels.arithmetic import Half, joined, multiply_add, subtract_scale, subtract_scale_add
from pallas_kernels.parts import LOG2E, add_up, by_slots, channel_statistic, dot, for_tokens, query_planes, token_statistic
from pallas_kernels.planes import Planes
from pallas_kernels.tile import Tile
from pallas_kernels.words import Words, read_words

Rows = list[Float[Array, "rows GP"]]


class Side(abc.ABC):
    """Keys or values of one layer, as a kernel reads them. Arrays have leading axes [B, K], which a kernel's block fixes; either may be
    shorter where neighbours share an entry: 1 where all rows of the batch, or all heads, do."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Tokens that share a row of words; a tile's scores and weights come as one array [tile / slots, GP] for each slot."""

    @property
    @abc.abstractmethod
    def chunks(self) -> tuple[int, int]:
        """(count, width): how the H channels are cut into the tiles of an accumulator."""

    @abc.abstractmethod
    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """The stored arrays [B, K, ...], reshaped as the kernel indexes them. No copy."""

    @property
    def adds_values(self) -> bool:
        """Whether `more_values` gives anything: the kernel then keeps all scores."""
        return False

    def more_values(
        self, weights: Float[Array, "B K G S"], stored: Sequence[Array], limits: Int[Array, " B"]
    ) -> Float[Array, "B K G H"] | None:
        """What is to be added to the weighted values of the first limits[b] tokens; None for nothing."""
        return None

    def more_scores(
        self, q: Float[Array, "B K G H"], stored: Sequence[Array], limits: Int[Array, " B"], how: Launch
    ) -> Float[Array, "B K G S"] | None:
        """What is to be added to q . k of the first limits[b] tokens, not scaled; None for nothing."""
        return None

    @abc.abstractmethod
    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        """What `scores` needs of the queries, made once outside the kernel. q is fp32 and not scaled."""

    @abc.abstractmethod
    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        """log2(e) / sqrt(H) * q . k of a tile, fp32. What it gives for tokens that do not count is not used."""

    @abc.abstractmethod
    def weigh(self, weights: Rows, refs: Sequence[Any], tile: Tile, sums: list[Float[Array, "W GP"]], asm: bool) -> list[Array]:
        """`sums`, one for each chunk of channels, plus the weighted values of a tile. Weights of tokens that do not count are 0."""

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        """What reads the rows of a tile in fp16: (slot, chunk) -> the slot's tokens, the chunk's channels. For keys that are rotated."""
        raise NotImplementedError(f"{type(self).__name__} does not give single rows")


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


@dataclasses.dataclass(frozen=True)
class Dense(Side):
    """Exact rows: [B, K, S, H] in bfloat16 or float16, perhaps as uint16 that holds their bits."""

    channels: int
    dtype: str

    @property
    def slots(self) -> int:
        return 1

    @property
    def chunks(self) -> tuple[int, int]:
        return 1, self.channels

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(stored)

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        return (q.astype(self.dtype),)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        return [dot(self._rows(refs[0], tile), query[0][...], (1, 1)) * (LOG2E * self.channels**-0.5)]

    def weigh(self, weights: Rows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool) -> list[Array]:
        return [sums[0] + dot(self._rows(refs[0], tile), weights[0].astype(self.dtype), (0, 0))]

    def _rows(self, ref: Any, tile: Tile) -> Float[Array, "tile H"]:
        found = ref[pl.ds(tile.offset(1), tile.size), :]
        if found.dtype == jnp.uint16:
            found = lax.bitcast_convert_type(found, jnp.dtype(self.dtype))
        if tile.masked:
            token = lax.broadcasted_iota(jnp.int32, (tile.size, 1), 0)
            found = jnp.where(tile.counts(token), found, 0)
        return found
