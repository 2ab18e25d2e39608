"""Sum the contributions of outliers of values to weighted values, in one launch after attention,
from the scores and the largest scores of pieces that it leaves.

    m of a tile's pieces,   l = 0,   o[h, r] = sum of 2^(score[r] - m[r]) residual
                                               over the slots at channel h

The pieces of attention have the sums of weights, so merging them with these (merge.py) is exact.
The products are those of decode_attention/outlier_values.py: a channel is a (row, column) of sums
with ROWS rows. A block reads a span with each of its warps.

Programs share the same tiles as in attention, twice as many, so that a share meets at most two
pieces of attention, whose larger m bounds all of its scores.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# types are checked with JAX 0.10, whose Mosaic GPU is older, and MLIR's stubs lack some

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float

from pallas_kernels.decode_attention.schedule import Pieces, TileRun
from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.outliers import Pools, Step, gathered, iota
from pallas_kernels.mosaic.registers import (
    OF_ALL_WARPS,
    ROWS,
    SIDE,
    WARPS,
    element,
    less,
    place_in_matrix,
    twice,
    warp,
)
from pallas_kernels.mosaic.walk import Walk
from pallas_kernels.tiles.layout import SPAN

MORE_PROGRAMS = 2  # for each of attention's: smaller blocks, of which more run at a time


def outlier_values(
    scores: Float[Array, "B k N R 32"],
    stored: Sequence[Array],
    of_body: Pieces,
    capacity: int,
    channels: int,
    first: int,
    interpret: Any = None,
) -> Pieces:
    """Return what outliers add to the weighted values of attention's pieces.

    Args:
        scores: in units of log2, tile by tile, each of whole stripes. Those of tokens that do not
            count may be anything.
        stored: the arrays of a side with outliers in pools of a span.
        of_body: the pieces of attention.
        capacity: tokens that the arrays have room for.
        channels: H.
        first: the KV head of the first scores.
    """
    index, residual, ends = stored[-3:]
    heads, real, coarse = scores.shape[1], scores.shape[3], of_body.schedule
    schedule = dataclasses.replace(coarse, programs=MORE_PROGRAMS * coarse.programs)
    width = channels // ROWS

    def outlier_values(limits_ref: Any, *refs: Any) -> None:
        of_body_ref, scores_ref, ends_ref, index_ref, residual_ref, m_ref, l_ref, o_ref = refs
        walk, ops = Walk(schedule, limits_ref), Matrices(bool(interpret))
        program = lax.axis_index("block")
        begin, end = walk.share(program)
        of_coarse = coarse.per_program(walk.total())

        def read(at: jax.Array) -> jax.Array:
            run = walk.run(at, end)
            unit = run.row * heads + run.head
            tiles = run.end - run.first
            nearest = [lax.div(tile, of_coarse) + unit for tile in (at, at + tiles - 1)]
            largest = [
                jnp.maximum(*(of_body_ref[place, g] for place in nearest)) for g in range(real)
            ]
            rows = [ref.at[run.row] for ref in (index_ref, residual_ref, ends_ref)]
            share = _Share(
                Pools(*rows, channels, ops.interpret),
                scores_ref.at[run.row, run.head],
                run,
                schedule.tile,
                capacity,
                run.head + first,
                largest,
                ops,
            )
            sums = share.sums()
            place = program + unit
            for g, of_head in enumerate(sums):
                _store(o_ref.at[place], jnp.sum(of_head, axis=0), g, ops.interpret)
            _store_bounds(m_ref.at[place], l_ref.at[place], largest)
            return at + tiles

        lax.while_loop(lambda at: at < end, read, begin)

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    of_piece = (real,), (real,), (ROWS, width, real)
    call = plgpu.kernel(
        outlier_values,
        out_type=tuple(f32((schedule.pieces, *shape)) for shape in of_piece),
        grid=(schedule.programs,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=4 * WARPS * ROWS * max(width, SIDE),
        ),
        interpret=interpret,
    )
    with jax.enable_x64(False):
        m, l, o = call(of_body.limits, of_body.m, scores, ends, index, residual)
    o = o.reshape(schedule.pieces, channels, real)
    return Pieces(m, l, o, of_body.limits, schedule)


@dataclasses.dataclass(frozen=True)
class _Share:
    """A run of tiles. scores: of its unit, [N, R, SPAN]. head: among all KV heads. largest: what
    bounds the scores of each query head."""

    pools: Pools
    scores: Any
    run: TileRun
    tile: int
    capacity: int
    head: Any
    largest: Sequence[Any]
    ops: Matrices

    @property
    def width(self) -> int:
        return self.pools.channels // ROWS

    def sums(self) -> list[jax.Array]:
        """Return sums of each query head, [WARPS, ROWS, columns]."""
        stripes = self.tile // (WARPS * SPAN)
        nothing = splat((WARPS, ROWS, max(self.width, SIDE)), 0.0)

        def read(number: Any, sums: list[jax.Array]) -> list[jax.Array]:
            return self._add_stripe(number, lax.div(number, jnp.int32(stripes)), sums)

        first, end = self.run.first * stripes, self.run.end * stripes
        return lax.fori_loop(first, end, read, [nothing] * len(self.largest))

    def _add_stripe(self, stripe: Any, tile: Any, sums: list[jax.Array]) -> list[jax.Array]:
        """Add the slots of a stripe, of those that tiles are cut into."""
        kept = stripe * (WARPS * SPAN)  # the place of its scores
        begin = tile * self.tile
        # The last tile moves back to stay inside the arrays.
        moved = begin - jnp.minimum(begin, self.capacity - self.tile)
        starts = [kept - moved + warp * SPAN for warp in range(WARPS)]
        slots = self.pools.open(
            [lax.div(start, jnp.int32(SPAN)) for start in starts],
            self.head,
            [(start >= begin) & (start < self.run.limit) for start in starts],
        )
        shape = slots.slots.shape
        span = kept + SPAN * iota(shape, 0)
        live = self.run.limit - (span - moved)

        def add(number: Any, sums: list[jax.Array]) -> list[jax.Array]:
            step = slots.step(number)
            weights = self._weights(step, span + step.token, step.used & (step.token < live))
            row, column = step.channel >> (self.width.bit_length() - 1), iota(shape, 1)
            residuals = [
                jnp.where(row - column == i, step.residual, 0.0).astype(jnp.float16)
                for i in range(0, ROWS, SIDE)
            ]
            residual = self.ops.stacked(residuals, ROWS)
            distance = (step.channel & (self.width - 1)) - column
            added = []
            for before, weight in zip(sums, weights, strict=True):
                parts = [
                    jnp.where(distance == i, weight, 0.0).astype(jnp.float16)
                    for i in range(0, before.shape[2], SIDE)
                ]
                chosen = self.ops.stacked(parts, before.shape[2])
                added.append(self.ops.product(before, residual, chosen))
            return added

        return lax.fori_loop(0, slots.steps, add, sums)

    def _weights(self, step: Step, token: jax.Array, counts: jax.Array) -> list[jax.Array]:
        """Return the weights of each query head for these slots, 0 for those that do not count."""
        real = len(self.largest)
        width, weights = min(real, 4), []
        for first in range(0, real, width):
            scores = gathered(
                self.scores, token * real + first, jnp.float32, self.ops.interpret, width=width
            )
            for score, largest in zip(scores, self.largest[first:], strict=False):
                weights.append(jnp.where(counts, jnp.exp2(score - largest), 0.0))
        return weights


def _store(ref: Any, x: jax.Array, head: int, interpret: bool) -> None:
    """Store [ROWS, columns], the same in every warp, to [ROWS, width, R] at one query head."""
    width, heads = ref.shape[1:]
    if interpret:
        ref[:, :, head] = x[:, :width]
        return
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), OF_ALL_WARPS))

    @inline
    def store(ctx: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        base, (row, pair) = utils.memref_ptr(ref), place_in_matrix()
        column = twice(pair)
        registers = x.registers.reshape(ROWS // SIDE, -1)
        for number, ((i, j), register) in enumerate(np.ndenumerate(registers)):
            # The warps take turns, as all of them have the numbers.
            stores = less(warp(), number % WARPS, equal=True)
            if width % SIDE:
                stores = arith.andi(stores, less(column, width))
            channel = arith.addi(
                arith.muli(arith.addi(row, utils.c(i * SIDE, i32)), utils.c(width, i32)),
                arith.addi(column, utils.c(j * SIDE, i32)),
            )
            offset = arith.addi(arith.muli(channel, utils.c(heads, i32)), utils.c(head, i32))
            with utils.when(stores):
                for e in range(2):
                    at = arith.addi(offset, utils.c(e * heads, i32))
                    pointer = utils.getelementptr(base, [at], f32)
                    llvm.store(element(register, e), pointer, alignment=4)

    store(ref, x)


def _store_bounds(m_ref: Any, l_ref: Any, largest: Sequence[Any]) -> None:
    """Store m of each query head, and l = 0."""
    for g, bound in enumerate(largest):
        m_ref[g], l_ref[g] = bound, jnp.zeros_like(bound)
