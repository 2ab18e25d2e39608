"""Sum the contributions of outliers of keys to scores, in one launch before attention.

    scores    sum over the slots of a head and token    residual * q[channel]

A warp takes a head of a pool, which is a span of tokens. A step's contributions are computed for
each slot and query head in fp32. A product with a one-hot matrix adds them to their tokens. It
takes them as two fp16 numbers, the second of which is what the first one lacks.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.outliers import Pools, Step, gathered, iota
from pallas_kernels.mosaic.registers import SIDE, WARPS
from pallas_kernels.mosaic.spans_of_scores import store_spans
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.turn import turn
from pallas_kernels.tiles.layout import SPAN

_MAX_FP16 = 65504.0  # fp16


def outlier_scores(
    q: Float[Array, "B k Q H"],
    reader: Reader,
    stored: Sequence[Array],
    limits: Int[Array, " B"],
    group: int,
    first: int,
    interpret: Any = None,
) -> Float[Array, "B k N G 32"]:
    """Return the scores of N spans of tokens, a whole number of stripes, in the order of tokens,
    then query heads. Tokens from limits[b] on are unspecified.

    Args:
        q: scaled queries, padded to a multiple of SIDE.
        reader, stored: of keys with outliers in pools of a span.
        limits: the number of tokens of each row.
        group: G, the query heads of which scores are kept, a power of two.
        first: the KV head of the first queries.
    """
    tables = []
    if isinstance(reader, RotatedReader):
        stored, frequencies, factor, starts = reader.apart(stored)
        turns = turn(frequencies, starts)
        tables = [jnp.stack(turns[:2], axis=-1), jnp.stack(turns[2:], axis=-1)]
        q = q * factor
    index, residual, ends = stored[-3:]
    batch, heads, columns, channels = q.shape
    pools, stripes = index.shape[1], pl.cdiv(index.shape[1], WARPS)

    def outlier_scores(limits_ref: Any, q_ref: Any, *refs: Any) -> None:
        *table_refs, ends_ref, index_ref, residual_ref, out_ref = refs
        row, head, stripe = (lax.axis_index(name) for name in ("row", "head", "stripe"))
        limit, ops = limits_ref[row], Matrices(bool(interpret))

        @pl.when(stripe * (WARPS * SPAN) < limit)
        def _() -> None:
            numbers = [stripe * WARPS + warp for warp in range(WARPS)]
            inside = [jnp.minimum(number, pools - 1) for number in numbers]
            counts = [number * SPAN < limit for number in numbers]
            rows = [ref.at[row] for ref in (index_ref, residual_ref, ends_ref)]
            slots = Pools(*rows, channels, ops.interpret).open(inside, head + first, counts)
            queries = _Queries(q_ref.at[row, head], table_refs, channels, stripe, ops.interpret)

            def add(number: Any, total: jax.Array) -> jax.Array:
                step = slots.step(number)
                tokens = [
                    jnp.where(step.token - iota(step.token.shape, 1) == i, 1.0, 0.0)
                    for i in range(0, SPAN, SIDE)
                ]
                chosen = ops.stacked([token.astype(jnp.float16) for token in tokens], SPAN)
                sums = [queries.times(step, i) for i in range(0, columns, SIDE)]
                for half in zip(*map(_halves, sums), strict=True):
                    total = ops.product(total, chosen, ops.stacked(half, columns))
                return total

            total = lax.fori_loop(0, slots.steps, add, splat((WARPS, SPAN, columns), 0.0))
            store_spans(out_ref.at[row, head, pl.ds(stripe * WARPS, WARPS)], total, ops.interpret)

    call = plgpu.kernel(
        outlier_scores,
        out_type=jax.ShapeDtypeStruct((batch, heads, stripes * WARPS, group, SPAN), jnp.float32),
        grid=(batch, heads, stripes),
        grid_names=("row", "head", "stripe"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    with jax.enable_x64(False):
        return call(limits.astype(jnp.int32), q.astype(jnp.float32), *tables, ends, index, residual)


class _Queries:
    """The queries of a KV head [Q, H]. tables: cosines and sines of spans and of the distances in
    one, [n, H / 2, 2], or none."""

    def __init__(
        self, ref: Any, tables: Sequence[Any], channels: int, stripe: Any, interpret: bool
    ):
        self._ref, self._tables, self._channels = ref, tables, channels
        self._stripe, self._interpret = stripe, interpret

    def times(self, step: Step, first: int) -> jax.Array:
        """Return what each slot adds to the scores of query heads `first` to `first` + SIDE,
        [WARPS, SIDE, STEP]."""
        shape, half = step.channel.shape, self._channels // 2
        row = (iota(shape, 1) + first) * self._channels
        [q] = self._gathered(self._ref, row + step.channel)
        if not self._tables:
            return step.residual * q
        [other] = self._gathered(self._ref, row + ((step.channel + half) & (self._channels - 1)))
        pair = step.channel & (half - 1)
        last = self._tables[0].shape[0] - 1
        span = jnp.minimum(self._stripe * WARPS + iota(shape, 0), last)
        (cos_a, sin_a), (cos_b, sin_b) = (
            self._gathered(table, 2 * (half * number + pair), 2)
            for table, number in zip(self._tables, (span, step.token), strict=True)
        )
        cos, sin = cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b
        other = jnp.where(step.channel < half, other, -other)
        return step.residual * (cos * q + sin * other)

    def _gathered(self, ref: Any, places: jax.Array, width: int = 1) -> list[jax.Array]:
        return gathered(ref, places, jnp.float32, self._interpret, width=width)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two fp16 numbers whose sum is x, or the largest one."""
    x = jnp.maximum(jnp.minimum(x, _MAX_FP16), -_MAX_FP16)
    high = x.astype(jnp.float16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.float16)
