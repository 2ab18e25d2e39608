"""Add the outliers of values, weighted by the scores that the attention kernel has stored, in one
launch after it.

    l = 0,    o[h, r] = sum of 2^(score[r] - m[r]) residual    over the slots at channel h
                                                               of the first limits[b] tokens

The parts of the dense codes have the sum of the weights, so merging them with these parts
(merge.py) is exact. Slots lie in pools (readers/sparse_outliers.py). Programs share the live tiles
of a batch as they do in attention (schedule.py). A step takes as many slots of a pool as the pool
has tokens.

A pool's slots are sorted by token, not by channel. Sums over a channel are products of one-hot
matrices, without atomics, so results do not depend on the order of threads. A channel is a (row,
column) of a tile of sums with ROWS rows:

    o[row, column, r] = sum over slots
                        (residual in the slot's row)  x  (weight[r] in the slot's column)

For 128 channels this takes 16 entries per slot, and 8 per query head. A vector over all channels
would take 128. Residuals are fp16 as they are stored. Weights are rounded to fp16, as in attention
over the dense part. Products and sums are fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float16, Int, UInt16

from pallas_kernels.decode_attention.partial_attention import NEG_INF, WEIGHT_EXPONENT
from pallas_kernels.decode_attention.schedule import Pieces, Schedule, TileRun, Unit
from pallas_kernels.decode_attention.tuning import WARPS, Tuning
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.readers.shared import as_float, dot, real_columns
from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.triton_call import plt, triton_call, whole_array_but

ROWS, MIN_COLUMNS = 16, 8  # of a tensor core's product

OfHead: TypeAlias = tuple[Float[Array, "ROWS columns"], Float[Array, ""]]  # o and m of a query head


def tuning_for(group: int) -> Tuning:
    """Return the default tuning for `group` query heads. With up to four, a program takes 168
    registers, counted for an H200.
    """
    return Tuning(tile=128, stages=1, resident=12 if group <= 4 else WARPS)


def outlier_values(
    scores: Float[Array, "B k R S"],
    index: UInt16[Array, "B n P"],
    residual: Array,
    ends: UInt16[Array, "B n K"],
    limits: Int[Array, " B"],
    channels: int,
    *,
    first: int = 0,
    tuning: Tuning | None = None,
    launch: Launch = LAUNCH,
) -> Pieces:
    """Return what outliers add to the weighted values of the first limits[b] tokens, exact up to
    rounding.

    The equation is in the module's docstring. m is NEG_INF and o is 0 if a program met no slot.

    Args:
        scores: fp32, in units of log2, for R query heads padded to a power of two. Scores of other
            tokens may be anything, as may the slots of pools in which no token counts.
        index: places of the slots in their pool.
        residual: [B, n, P], fp16, or uint16 that holds the bits.
        ends: for each head, the first slot behind its slots.
        limits: the number of tokens of each row.
        channels: H, a power of two, at least 16.
        first: the KV head of the first scores.

    Raises ValueError if the tuning's tile is not a whole number of pools.
    """
    batch, heads, group, tokens = scores.shape
    pool, tuning = tokens // index.shape[1], tuning or tuning_for(group)
    if tuning.tile % pool:
        raise ValueError(f"{tuning.tile=} is not whole pools of {pool} tokens")
    schedule = Schedule(tuning.programs(batch * heads, tokens), tuning.tile, batch, heads)
    of_piece = (group,), (group,), (ROWS, channels // ROWS, group)
    shapes = [jax.ShapeDtypeStruct((schedule.pieces, *shape), jnp.float32) for shape in of_piece]
    limits = limits.astype(jnp.int32)
    inputs = limits, jnp.full((1,), first, jnp.int32), ends, index, residual, scores
    m, l, o = triton_call(
        functools.partial(_kernel, schedule=schedule, pool=pool, asm=launch.asm),
        name="outlier_values",
        grid=(schedule.programs,),
        in_specs=[whole_array_but(0, array, ()) for array in inputs],
        out_specs=[whole_array_but(0, shape, ()) for shape in shapes],
        out_shape=shapes,
        launch=launch,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )(*inputs)
    return Pieces(m, l, o.reshape(schedule.pieces, channels, group), limits, schedule)


def _kernel(
    limits_ref: Any, first_ref: Any, *refs: Any, schedule: Schedule, pool: int, asm: bool
) -> None:
    # refs: ends [B, n, K], index and residual [B, n, P], scores [B, k, R, S]; m and l [pieces, R],
    # o [pieces, ROWS, H / ROWS, R]
    ends_ref, index_ref, residual_ref, scores_ref, m_ref, l_ref, o_ref = refs
    heads, width = o_ref.shape[3], o_ref.shape[2]

    def read(run: TileRun, place: Callable[[], Array]) -> None:
        scores = Unit(scores_ref, run.row, run.head, schedule)
        slots = _Slots(
            ends_ref, index_ref, residual_ref, scores, run, first_ref[0] + run.head, pool, width
        )
        nothing = (
            jnp.zeros((ROWS, max(width, MIN_COLUMNS)), jnp.float32),
            jnp.full((), NEG_INF, jnp.float32),
        )
        of_heads = lax.fori_loop(
            run.first,
            run.end,
            lambda tile, sums: slots.add_tile(tile, schedule.tile, sums, asm),
            [nothing] * heads,
        )
        piece = place()
        for g, (sums, largest) in enumerate(of_heads):
            m_ref[piece, g], l_ref[piece, g] = largest, jnp.zeros_like(largest)
            o_ref[piece, :, :, g] = real_columns(sums, width)

    schedule.for_each_run(limits_ref, read)


@dataclasses.dataclass(frozen=True)
class _Slots:
    """The slots of a run of tiles, and the scores of their tokens. `head` counts among all KV
    heads, and `width` is the number of channels in a row of sums.
    """

    ends: Any
    index: Any
    residual: Any
    scores: Unit
    tokens: TileRun
    head: Int[Array, ""]
    pool: int
    width: int

    def add_tile(
        self, tile: Int[Array, ""], size: int, of_heads: list[OfHead], asm: bool
    ) -> list[OfHead]:
        """Add the slots of tile number `tile`, which has `size` tokens."""
        lanes = lax.broadcasted_iota(jnp.int32, (size,), 0)
        pool = tile * (size // self.pool) + lanes // self.pool
        live = pool * self.pool < self.tokens.limit  # if no token counts, ends may be anything
        end = self._load(self.ends, pool, self.head, live).astype(jnp.int32)
        begin = self._load(
            self.ends, pool, jnp.maximum(self.head - 1, 0), live & (self.head > 0)
        ).astype(jnp.int32)

        def step(i: Array, of_heads: list[OfHead]) -> list[OfHead]:
            return self._add(pool, begin + i * self.pool + lanes % self.pool, end, of_heads, asm)

        return lax.fori_loop(0, pl.cdiv(jnp.max(end - begin), self.pool), step, of_heads)

    def _add(
        self,
        pool: Int[Array, " size"],
        slot: Int[Array, " size"],
        end: Int[Array, " size"],
        of_heads: list[OfHead],
        asm: bool,
    ) -> list[OfHead]:
        """Add one slot of each of these pools, if it lies before the end."""
        used, channels = slot < end, ROWS * self.width
        place = self._load(self.index, pool, slot, used).astype(jnp.int32)
        token, channel = pool * self.pool + place // channels, place % channels
        counts = used & (token < self.tokens.limit)
        residual = as_float(self._load(self.residual, pool, slot, counts), "float16").astype(
            jnp.float16
        )
        row = lax.broadcasted_iota(jnp.int32, (ROWS, slot.size), 0) == (channel // self.width)[None]
        column = (
            lax.broadcasted_iota(jnp.int32, (slot.size, of_heads[0][0].shape[1]), 1)
            == (channel % self.width)[:, None]
        )
        residuals, columns = jnp.where(row, residual[None], 0), column.astype(jnp.float16)
        scores = [
            plt.load(self.scores.at[g, token], mask=counts, other=NEG_INF)
            for g in range(len(of_heads))
        ]
        return [
            _added(of_head, s, residuals, columns, asm)
            for of_head, s in zip(of_heads, scores, strict=True)
        ]

    def _load(
        self,
        ref: Any,
        pool: Int[Array, " size"],
        at: Int[Array, "*size"],
        mask: Bool[Array, " size"],
    ) -> Array:
        return plt.load(ref.at[self.tokens.row, pool, at], mask=mask, other=0)


def _added(
    of_head: OfHead,
    scores: Float[Array, " size"],
    residuals: Float16[Array, "ROWS size"],
    columns: Float16[Array, "size columns"],
    asm: bool,
) -> OfHead:
    """Return the sums of a query head with these slots added. Residuals are 0 for scores of
    NEG_INF.
    """
    sums, largest = of_head
    new = jnp.maximum(largest, jnp.max(scores) - WEIGHT_EXPONENT)
    weights = exp2(scores - new, asm).astype(jnp.float16)
    return sums * jnp.exp2(largest - new) + dot(residuals, columns * weights[:, None], (1, 0)), new
