"""Merge attention over parts of the tokens on Mosaic GPU, by the equations of
decode_attention/merge.py.

A block merges LANE channels for all query heads of a KV head. Its warps read pieces in turn, each
with a merge of its own, and meet once, at the end. A lane holds all query heads of a channel.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxtyping import Array, Int

from pallas_kernels.decode_attention.partial_attention import NEG_INF, Splits
from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.mosaic.registers import WARPS, element, lane, less, warp
from pallas_kernels.mosaic.walk import Walk
from pallas_kernels.readers.shared import LN2

LANE = 32  # channels of a block, one for each lane
_AT_ONCE = 8  # pieces that a warp loads before it needs the first, or 32 numbers of a lane


@dataclasses.dataclass(frozen=True)
class Merged:
    """Merges pieces. A carry holds each warp's largest scores and sums of weights [WARPS, heads],
    and sums of values [WARPS, LANE, heads]."""

    heads: int

    @property
    def layout(self) -> Any:
        # 16 bytes are the most that an instruction loads.
        tiles = [(WARPS, LANE, self.heads), *([(4,)] if self.heads > 4 else [])]
        warp, lane = -2 - len(tiles), -1 - len(tiles)
        tiling = fragmented_array.Tiling(tuple(tiles))
        return plgpu.Layout.TILED(tiling, warp_dims=(warp,), lane_dims=(lane,), vector_dim=-1)

    @property
    def of_heads(self) -> Any:
        return self.layout.reduce(1)

    def start(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        def splat(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        of_heads = (WARPS, self.heads)
        return (
            splat(of_heads, NEG_INF, self.of_heads),
            splat(of_heads, 0.0, self.of_heads),
            splat((WARPS, LANE, self.heads), 0.0, self.layout),
        )

    def on_channels(self, x: jax.Array) -> jax.Array:
        shape = (WARPS, LANE, self.heads)
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0, 2)), self.layout)

    def add(self, carry: Any, loaded: Sequence[Any]) -> Any:
        """Merge pieces, each (numbers [WARPS], counts, m, l, o)."""
        largest, total, sums = carry
        m = [jnp.where(counts(m.shape, self.of_heads), m, NEG_INF) for counts, m, _, _ in loaded]
        new = functools.reduce(jnp.maximum, m, largest)
        shrink = jnp.exp2(largest - new)
        total, sums = total * shrink, sums * self.on_channels(shrink)
        for (counts, _, l, o), of_piece in zip(loaded, m, strict=True):
            share = jnp.exp2(of_piece - new)
            # places without a unit may hold anything
            total = total + jnp.where(counts(l.shape, self.of_heads), l, 0.0) * share
            o = jnp.where(counts(o.shape, self.layout), o, 0.0)
            sums = sums + o * self.on_channels(share)
        return new, total, sums

    def pieces(
        self, part: Pieces, refs: Sequence[Any], unit: Any, channels: Any, carry: Any
    ) -> Any:
        """Merge the pieces of a unit (row, head)."""
        limits_ref, *arrays = refs
        of_warp = max(1, min(_AT_ONCE, 32 // self.heads, part.m.shape[0] // WARPS))
        size, count = WARPS * of_warp, part.m.shape[0]
        walk = Walk(part.schedule, limits_ref)

        def step(i: Any, carry: Any, first: Any, last: Any) -> Any:
            begin = first + i * size
            # The last step moves back, and masks the pieces that an earlier step has merged.
            start = jnp.minimum(begin, count - size)
            loaded = []
            for j in range(of_warp):
                at = start + WARPS * j
                places = pl.ds(at, WARPS)
                counts = functools.partial(_inside, at, begin, last)
                loaded.append((counts, *self._load([a.at[places] for a in arrays], channels)))
            return self.add(carry, loaded)

        segments = part.schedule.segments
        for segment in range(segments):
            number = unit[0] * segments + segment
            first, last = walk.pieces_of(number, unit[1])
            of_unit = functools.partial(step, first=first, last=last)
            carry = lax.fori_loop(0, pl.cdiv(last - first, size), of_unit, carry)
        return carry

    def split(self, refs: Sequence[Any], unit: Any, channels: Any, carry: Any) -> Any:
        """Merge a part that is one piece: that of the first warp."""
        m, l, o = self._load([ref.at[(*unit, 0)] for ref in refs], channels)
        shape = (WARPS, self.heads)
        m, l = (plgpu.layout_cast(jnp.broadcast_to(x, shape), self.of_heads) for x in (m, l))
        o = plgpu.layout_cast(jnp.broadcast_to(o, (WARPS, *o.shape)), self.layout)
        return self.add(carry, [(functools.partial(_inside, 0, 0, 1), m, l, o)])

    def _load(self, refs: Sequence[Any], channels: Any) -> list[jax.Array]:
        m_ref, l_ref, o_ref = refs
        layout, of_heads, o_at = self.layout, self.of_heads, (slice(None), channels)
        if len(m_ref.shape) == 1:  # the same in all warps
            layout, of_heads, o_at = layout.reduce(0), of_heads.reduce(0), (channels,)
        load = functools.partial(plgpu.load, optimized=False)
        m, l = (load(ref, layout=of_heads) for ref in (m_ref, l_ref))
        return [m, l, load(o_ref.at[o_at], layout=layout)]

    def finished(self, carry: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return m, l [heads] and o [LANE, heads] of all warps."""
        largest, total, sums = carry
        of_all = jnp.max(largest, axis=0)
        repeated = lax.broadcast_in_dim(of_all, (WARPS, self.heads), (1,))
        share = jnp.exp2(largest - plgpu.layout_cast(repeated, self.of_heads))
        sums = jnp.sum(sums * self.on_channels(share), axis=0)
        return of_all, jnp.sum(total * share, axis=0), sums

    def divided(self, total: jax.Array, sums: jax.Array) -> jax.Array:
        minimum = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        repeated = lax.broadcast_in_dim(minimum, sums.shape, (1,))
        return sums / plgpu.layout_cast(repeated, self.layout.reduce(0))


def _inside(at: Any, begin: Any, last: Any, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Return True for places from `begin` up to `last`, the first axis counting from `at`."""
    place = at + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    return (place >= begin) & (place < last)


def _store(ref: Any, x: jax.Array, layout: Any, interpret: bool) -> None:
    """Store the transpose of [LANE, heads] to [heads, LANE], or [heads] to [heads]. All warps hold
    the same, and take turns."""
    if interpret:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(ctx: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
        heads, index = x.shape[-1], ir.IndexType.get()
        for i, register in enumerate(x.registers.flatten()):
            width = heads // x.registers.size
            for head in range(i * width, (i + 1) * width):
                stores = less(warp(), head % WARPS, equal=True)
                at = [utils.c(head, index)]
                if len(x.shape) == 1:
                    stores = arith.andi(stores, less(lane(), 0, equal=True))
                else:
                    at.append(arith.index_castui(index, lane()))
                with utils.when(stores):
                    memref.store(element(register, head % width), ref, at)

    store(ref, x)


def call(
    parts: Sequence[Splits | Pieces],
    shapes: Sequence[jax.ShapeDtypeStruct],
    positions: Int[Array, " B"] | None,
    capacity: int,
    interpret: Any = None,
) -> Sequence[Array]:
    """Return m, l and o of all parts if there are no positions, else [o / l], by the description of
    `merge.merged` and `merge.merged_output`.

    Args:
        shapes: of the outputs, [B, K, R] and [B, K, R, H].
        positions, capacity: as `merge.merged_output` takes them.
    """
    batch, kv_heads, heads, channels = shapes[-1].shape
    block, dtype = Merged(heads), shapes[-1].dtype
    arrays, counts = [] if positions is None else [positions], []
    for part in parts:
        of_part = [part.m, part.l, part.o]
        if isinstance(part, Pieces):
            of_part.insert(0, part.limits)
        arrays += of_part
        counts.append(len(of_part))

    def merge(*refs: Any) -> None:
        unit = lax.axis_index("row"), lax.axis_index("head")
        channels = pl.ds(lax.axis_index("channels") * LANE, LANE)
        left, outputs = list(refs[: len(arrays)]), refs[len(arrays) :]
        position_ref = None if positions is None else left.pop(0)
        carry = block.start()
        for part, count in zip(parts, counts, strict=True):
            of_part, left = left[:count], left[count:]
            if isinstance(part, Pieces):
                carry = block.pieces(part, of_part, unit, channels, carry)
            else:
                carry = block.split(of_part, unit, channels, carry)
        largest, total, sums = block.finished(carry)
        store = functools.partial(_store, interpret=bool(interpret))
        if position_ref is not None:
            out = block.divided(total, sums)
            lost = position_ref[unit[0]] >= capacity
            out = jnp.where(lost, jnp.full_like(out, jnp.nan), out).astype(dtype)
            store(outputs[0].at[(*unit, slice(None), channels)], out, block.layout.reduce(0))
            return
        store(outputs[2].at[(*unit, slice(None), channels)], sums, block.layout.reduce(0))

        @pl.when(lax.axis_index("channels") == 0)
        def _() -> None:
            for ref, x in zip(outputs, (largest * LN2, total), strict=False):
                store(ref.at[unit], x, block.of_heads.reduce(0))

    launch = plgpu.kernel(
        merge,
        out_type=tuple(shapes),
        grid=(batch, kv_heads, channels // LANE),
        grid_names=("row", "head", "channels"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=4 * WARPS * LANE * heads,
        ),
        interpret=interpret,
    )
    with jax.enable_x64(False):
        return launch(*arrays)
