"""Attention over the full-precision windows of a cache on Mosaic GPU, by the equations of
decode_attention/windows.py: one program of the kernel that appends a token (mosaic/append.py).

Each warp reads rows of its own, straight from global memory, with an online softmax of its own, as
attention over the body does.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.angles import by_elements
from pallas_kernels.decode_attention.partial_attention import NEG_INF, WEIGHT_EXPONENT
from pallas_kernels.mosaic.matrices import Matrices, on_rows, on_warps, splat
from pallas_kernels.mosaic.registers import LANES, OF_ALL_ROWS, OF_ALL_WARPS, ROWS, SIDE, WARPS
from pallas_kernels.mosaic.rows import Rows
from pallas_kernels.readers.shared import LOG2E, soft_capped

CHUNK = 32  # channels whose sums the warps merge together
# slots -> (position of their tokens, True for tokens that are read here)
Tokens = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Window:
    """Keys and values of a head [slots, H], the new row of each [1, H], its slot or -1, and the
    tokens of slots."""

    sides: Sequence[Any]
    rows: Sequence[Any]
    new_slot: Any
    tokens: Tokens


@dataclasses.dataclass(frozen=True)
class Attending:
    """Attention to windows in steps, by one program.

    Args:
        query: [WARPS, columns, H], in the windows' dtype.
        first: the first token that the query sees, or None.
        units: of keys before RoPE, refs of the units of their frequencies (angles.py), each [1,
            H / 2], or None.
    """

    query: jax.Array
    scale: Any
    first: Any
    soft_cap: float | None
    ops: Matrices
    units: Sequence[Any] | None = None

    @classmethod
    def opened(cls, q_ref: Any, shared: Sequence[Any], *options: Any) -> Attending:
        """`shared`: refs of the units of keys before RoPE and of their attention factor, or
        nothing."""
        rows = plgpu.load(q_ref, layout=OF_ALL_WARPS, optimized=False)
        scale = LOG2E * q_ref.shape[1] ** -0.5
        if not shared:
            return cls(on_warps(rows), scale, *options)
        *units, factor = shared
        return cls(on_warps(rows), factor[0] * scale, *options, units)

    @property
    def _columns(self) -> int:
        return self.query.shape[1]

    @property
    def _channels(self) -> int:
        return self.query.shape[2]

    @property
    def _of_warp(self) -> int:
        """Return how many slots of a tile a warp reads: as many as its registers hold."""
        wide = self._channels * self._columns <= 1024 and self.units is None
        return 2 * ROWS if wide else ROWS

    def start(self) -> Any:
        return (
            plgpu.layout_cast(jnp.full((WARPS, self._columns), NEG_INF, jnp.float32), OF_ALL_ROWS),
            splat((WARPS, SIDE, self._columns), 0.0),
            splat((WARPS, self._channels, self._columns), 0.0),
        )

    def add(self, window: Window, carry: Any) -> Any:
        tile, count = WARPS * self._of_warp, window.sides[0].shape[0]
        step = functools.partial(self._step, window, tile, count)
        tiles = -(-count // tile)
        return step(0, carry) if tiles == 1 else lax.fori_loop(0, tiles, step, carry)

    def _step(self, window: Window, tile: int, count: int, i: Any, carry: Any) -> Any:
        largest, total, sums = carry
        rows, ops = Rows(self.ops.interpret, self._of_warp), self.ops
        # The last tile moves back, and masks the slots that an earlier tile has read.
        start = jnp.minimum(i * tile, max(count - tile, 0))
        new_row = Rows(self.ops.interpret, 0)

        def slots(shape: tuple[int, ...]) -> jax.Array:
            of_warp = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LANES)
            in_warp = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LANES)
            return start + self._of_warp * of_warp + in_warp

        def seen(shape: tuple[int, ...]) -> jax.Array:
            slot = slots(shape)
            position, counts = window.tokens(slot)
            if self.first is not None:
                counts &= position >= self.first
            return counts & (slot >= i * tile) & (slot < count)

        def load(side: int) -> jax.Array:
            of_tile = window.sides[side].at[pl.ds(start, min(tile, count))]
            stored = rows.load(of_tile, self._of_warp, window.new_slot - start)
            new = new_row.load(window.rows[side], self._of_warp)
            return jnp.where(slots(stored.shape) == window.new_slot, new, stored)

        scores = splat((WARPS, ROWS, self._columns), 0.0)
        for channels, part in self._parts(load(0), lambda shape: window.tokens(slots(shape))[0]):
            scores = ops.product(scores, part, self.query[:, :, channels])
        scores = scores * self.scale
        if self.soft_cap is not None:
            scores = soft_capped(scores, self.soft_cap, False)
        scores = jnp.where(seen(scores.shape), scores, NEG_INF)
        new = jnp.maximum(largest, jnp.max(scores, axis=1) - WEIGHT_EXPONENT)
        shrink = jnp.exp2(largest - new)
        weights = jnp.exp2(scores - on_rows(new, self._of_warp))
        weights = jnp.where(seen(weights.shape), weights, 0.0)
        total = total * on_rows(shrink, SIDE)
        for row in range(0, self._of_warp, SIDE):
            total = total + weights[:, row : row + SIDE]
        values = load(1)
        # Slots without a token may hold anything.
        values = jnp.where(seen(values.shape), values, jnp.zeros_like(values))
        operands = (ops.transposed(x) for x in (values, weights.astype(values.dtype)))
        return new, total, ops.product(sums * on_rows(shrink, self._channels), *operands)

    def _parts(
        self, keys: jax.Array, positions: Callable[[tuple[int, ...]], jax.Array]
    ) -> Iterator[tuple[slice, jax.Array]]:
        """Yield parts of keys after RoPE, and the channels of each."""
        if self.units is None:
            yield slice(None), keys
            return
        half, rows = self._channels // 2, Rows(self.ops.interpret, 0)
        for begin in range(0, half, CHUNK):
            channels = slice(begin, begin + CHUNK), slice(half + begin, half + begin + CHUNK)
            of_units = (ref.at[:, pl.ds(begin, CHUNK)] for ref in self.units)
            units = [rows.load(ref, self._of_warp) for ref in of_units]
            cos, sin = by_elements(positions((WARPS, self._of_warp, CHUNK)), *units)
            first, second = (keys[:, :, of_half].astype(jnp.float32) for of_half in channels)
            turned = first * cos - second * sin, second * cos + first * sin
            for of_half, part in zip(channels, turned, strict=True):
                yield of_half, part.astype(keys.dtype)

    def parts(self, carry: Any) -> Any:
        """Return a carry with its sums cut into CHUNK channels, for `attention.store_merged`."""
        largest, total, sums = carry
        return (
            largest,
            total,
            *(sums[:, first : first + CHUNK] for first in range(0, self._channels, CHUNK)),
        )
