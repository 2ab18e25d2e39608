"""One block of decode attention on Mosaic GPU: four warps that read their share of all live tiles.

The copy engine (on Ampere and Ada, asynchronous copies) brings tiles into a ring of buffers in
shared memory. Each warp reads spans of its own, with an online softmax of its own, so warps meet
once for each tile: before the copy that overwrites what they have read. At the end of a run the
warps' parts are merged in the block.
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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.partial_attention import NEG_INF
from pallas_kernels.decode_attention.schedule import TileRun
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.mosaic.codebook import CodebookKeys, CodebookValues
from pallas_kernels.mosaic.copies import copy
from pallas_kernels.mosaic.dense import DenseKeys, DenseValues
from pallas_kernels.mosaic.grouped import GroupedKeys, GroupedValues
from pallas_kernels.mosaic.matrices import Matrices, on_rows, splat
from pallas_kernels.mosaic.polar import PolarKeys
from pallas_kernels.mosaic.registers import OF_ALL_ROWS, OF_ALL_WARPS, SIDE, WARPS
from pallas_kernels.mosaic.rotary import RotatedKeys
from pallas_kernels.mosaic.runs import RunsKeys, RunStripe, RunsValues
from pallas_kernels.mosaic.spans_of_scores import WithOutliers, store_spans
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.readers.shared import soft_capped
from pallas_kernels.tiles.layout import SPAN

Keys = GroupedKeys | CodebookKeys | DenseKeys | PolarKeys | RotatedKeys | RunsKeys | WithOutliers
Values = GroupedValues | CodebookValues | DenseValues | RunsValues


@dataclasses.dataclass(frozen=True)
class Block:
    """Four warps that read tiles together, and all that their steps share. A warp reads spans of
    `span` tokens. Weights are at most 2^exponent. `first` is the KV head of a run's head 0. `kept`
    has room for the scores of all tiles (spans_of_scores.py), or is None."""

    keys: Keys
    values: Values
    tuning: Tuning
    columns: int
    span: int
    exponent: int
    capacity: int
    soft_cap: float | None
    ops: Matrices
    arrays: tuple[Sequence[Any], Sequence[Any]]
    buffers: tuple[Sequence[Any], Sequence[Any]]
    barriers: Any
    first: int = 0
    kept: Any = None

    def _start(self, tile: Any) -> Any:
        """Return the first token of a tile. The last tile moves back to stay inside the arrays."""
        return jnp.minimum(tile * self.tuning.tile, self.capacity - self.tuning.tile)

    def fetch(self, run: TileRun, tile: Any, slot: Any) -> None:
        tokens, unit = pl.ds(self._start(tile), self.tuning.tile), (run.row, run.head + self.first)
        for side, arrays, buffers in zip(
            (self.keys, self.values), self.arrays, self.buffers, strict=True
        ):
            for source, target in side.copies(arrays, buffers, unit, tokens, slot):
                copy(source, target, None if self.barriers is None else self.barriers.at[slot])

    def release(self) -> None:
        """Let copies overwrite what all warps have read. Asynchronous copies of older GPUs wait for
        that by themselves."""
        if self.barriers is not None:
            plgpu.commit_smem()

    def wait(self, visit: Any, slot: Any, end: Any) -> None:
        """Wait until the tile of a visit has arrived."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[slot])
            return
        # Copies arrive in the order of their issue. Near the end fewer are on their way.
        copies, stages = len(self.arrays[0]) + len(self.arrays[1]), self.tuning.stages

        @pl.when(visit + stages <= end)
        def _() -> None:
            plgpu.wait_gmem_to_smem(copies * (stages - 1))

        @pl.when(visit + stages > end)
        def _() -> None:
            plgpu.wait_gmem_to_smem(0)

    def attend(self, run: TileRun, query: Any, table: Any) -> Any:
        """Return each warp's largest scores, sums of weights by row, and sums of values by
        chunk. `query` is opened by the keys, `table` by the values."""
        stages, size = self.tuning.stages, self.tuning.tile
        end = jnp.minimum(run.end, jnp.maximum(run.first, lax.div(run.limit, jnp.int32(size))))
        skipped, whole = run.whole(size, end)

        def tile_of(visit: Any) -> Any:
            """Return the tile of a visit. Tiles that count as a whole come first."""
            if run.lower is None:
                return visit
            place = visit - run.first + skipped
            later = jnp.where(place < whole + skipped, 0, place - skipped)
            return run.first + jnp.where(place < whole, place, later)

        self.release()
        for ahead in range(stages):

            @pl.when(run.first + ahead < run.end)
            def _(ahead: int = ahead) -> None:
                self.fetch(run, tile_of(run.first + ahead), ahead)

        def step(visit: Any, carry: Any, masked: bool) -> Any:
            tile, slot = tile_of(visit), lax.rem(visit - run.first, stages)
            self.wait(visit, slot, run.end)
            begin = tile * size if masked else None
            carry = self._step(tile, begin, run, slot, query, table, carry)

            @pl.when(visit + stages < run.end)
            def _() -> None:
                self.release()
                self.fetch(run, tile_of(visit + stages), slot)

            return carry

        chunks, width = self.values.chunks
        carry = (
            plgpu.layout_cast(jnp.full((WARPS, self.columns), NEG_INF, jnp.float32), OF_ALL_ROWS),
            splat((WARPS, SIDE, self.columns), 0.0),
            *[splat((WARPS, width, self.columns), 0.0)] * chunks,
        )
        masked_from = run.first + whole - skipped
        carry = lax.fori_loop(run.first, masked_from, functools.partial(step, masked=False), carry)
        return lax.fori_loop(masked_from, run.end, functools.partial(step, masked=True), carry)

    def _step(
        self, tile: Any, begin: Any, run: TileRun, slot: Any, query: Any, table: Any, carry: Any
    ) -> Any:
        """Read a tile. Only tokens from `begin` on that the run has count, or all if `begin` is
        None."""
        largest, total, *sums = carry
        keys, values = self.buffers
        start, masked, size = self._start(tile), begin is not None, WARPS * self.span
        ends = (run.lower, run.limit) if masked else ()
        kind = RunStripe if isinstance(self.values, RunsValues) else Stripe
        stripes = [
            kind(slot, i, start + size * i, self.span, *ends)
            for i in range(self.tuning.tile // size)
        ]
        scores = [self.keys.scores(query, keys, stripe, self.ops) for stripe in stripes]
        if self.soft_cap is not None:
            scores = [soft_capped(s, self.soft_cap, False) for s in scores]
        if self.kept is not None:
            for i, of_stripe in enumerate(scores):
                spans = pl.ds(tile * (self.tuning.tile // SPAN) + WARPS * i, WARPS)
                store_spans(self.kept.at[run.row, run.head, spans], of_stripe, self.ops.interpret)
        if masked:
            begin = begin if run.lower is None else jnp.maximum(begin, run.lower)
            for i, stripe in enumerate(stripes):
                token = stripe.start + stripe.token_numbers(scores[i].shape, 1)
                scores[i] = jnp.where((token >= begin) & (token < run.limit), scores[i], NEG_INF)
        top = functools.reduce(jnp.maximum, scores)
        new = jnp.maximum(largest, jnp.max(top, axis=1) - self.exponent)
        shrink = jnp.exp2(largest - new)
        weights = [jnp.exp2(s - on_rows(new, self.span)) for s in scores]
        total = total * on_rows(shrink, SIDE)
        for w in weights:
            for i in range(0, self.span, SIDE):
                total = total + w[:, i : i + SIDE]
        sums = [x * on_rows(shrink, x.shape[1]) for x in sums]
        for stripe, w in zip(stripes, weights, strict=True):
            half = self.ops.transposed(self._rounded(w, values, stripe))
            sums = self.values.weigh(half, values, stripe, sums, table, self.ops)
        return (new, total, *sums)

    def _rounded(self, weights: jax.Array, buffers: Sequence[Any], stripe: Stripe) -> jax.Array:
        """Return weights as the values take them."""
        if isinstance(self.values, RunsValues):
            return self.values.weighted(weights, buffers, stripe, self.ops)
        return weights.astype(self.values.weights_dtype)


def store_merged(outputs: Sequence[Any], carry: Any, ops: Matrices) -> None:
    """Merge the warps' parts (`Block.attend`) and store m [1, R], l [1, R] and o [H, R]."""
    (m_ref, l_ref, o_ref), (largest, total, *sums) = outputs, carry
    of_all = jnp.max(largest, axis=0)
    share = jnp.exp2(largest - _on_warps(of_all))
    whole = jnp.sum(jnp.sum(total, axis=1) * share, axis=0)
    ops.store(m_ref, _on_side(of_all))
    ops.store(l_ref, _on_side(whole))
    first = 0
    for x in sums:
        width = x.shape[1]
        merged = jnp.sum(x * on_rows(share, width), axis=0)
        ops.store(o_ref.at[pl.ds(first, width)], merged)
        first += width


def _on_warps(x: jax.Array) -> jax.Array:
    repeated = lax.broadcast_in_dim(x, (WARPS, x.shape[0]), (1,))
    return plgpu.layout_cast(repeated, OF_ALL_ROWS)


def _on_side(x: jax.Array) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (SIDE, x.shape[0]), (1,)), OF_ALL_WARPS)
