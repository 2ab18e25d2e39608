"""Quantize a span of rows to codes of a table on Mosaic GPU, by the equations of quantize/table.py:
ranges of tokens, without outliers.

All warps of a program quantize the same span. If all heads share a token's range, each head's
program reads the rows of all of them.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.matrices import in_lanes, splat
from pallas_kernels.mosaic.quantize import SpanAccess, Spans, stored_scale
from pallas_kernels.mosaic.registers import WARPS
from pallas_kernels.quantize.rounding import cleaned, finite_or, within_limit
from pallas_kernels.quantize.table import TableBlocks
from pallas_kernels.stored_scales import saturation_limit


def quantize_table_span(
    spans_of: Callable[[Any], Spans],
    head: Any,
    heads: int,
    blocks: TableBlocks,
    levels: Any,
    interpret: bool,
) -> None:
    """Quantize one head of a span.

    Args:
        spans_of: returns a head's span, the same in all warps. Its scales may be those of all
            heads.
        head: the KV head to write.
        heads: the number of KV heads.
        blocks: the format.
        levels: sorted, [2^bits] in global memory.
    """
    _TableWork(spans_of, head, heads, blocks, levels, interpret).write()


@dataclasses.dataclass(frozen=True)
class _TableWork:
    spans_of: Callable[[Any], Spans]
    head: Any
    heads: int
    blocks: TableBlocks
    levels: Any
    interpret: bool

    @property
    def _dtype(self) -> str:
        return self.blocks.scale_dtype

    @property
    def _limit(self) -> float:
        return saturation_limit(self._dtype)

    def _access(self, head: Any) -> SpanAccess:
        return SpanAccess(self.spans_of(head), self.blocks.layout, 0, self.interpret)

    def write(self) -> None:
        access, group = self._access(self.head), self.blocks.group
        assert group is not None, "route.unwritten refuses ranges of channels"
        words, middles = access.words(), self._middles()
        for slot, number, chunks in access.groups(group):
            low, high = self._range(slot, chunks)
            scale = stored_scale((high - low) / 2, self._dtype, 2)
            zero = ((high + low) / 2).astype(self._dtype).astype(jnp.float32)
            for c in chunks:
                x = cleaned(access.load(slot, c), low, high)
                words.add(slot, c, _codes(x, scale, zero, middles))

            @pl.when((self.head == 0) | (self.blocks.heads == 1))
            def _(slot: int = slot, number: int = number, scales: Any = (scale, zero)) -> None:
                access.store_scales(slot, number, scales)

    def _middles(self) -> list[jax.Array]:
        levels = [self.levels[i] for i in range(1 << self.blocks.layout.bits)]
        return [(high + low) / 2 for low, high in itertools.pairwise(levels)]

    def _range(self, slot: int, chunks: range) -> tuple[jax.Array, jax.Array]:
        """Return the least and the largest finite entry of these channels in each of them, of this
        head or of all heads. Both are 0 if no entry is finite."""

        def widen(head: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            access, (low, high) = self._access(head), bounds
            for c in chunks:
                x = access.load(slot, c)
                low = jnp.minimum(low, finite_or(x, jnp.inf))
                high = jnp.maximum(high, finite_or(x, -jnp.inf))
            return low, high

        def whole(operation: Any, bound: jax.Array) -> jax.Array:
            of_tokens = within_limit(operation(bound, axis=2), self._limit)
            return in_lanes(lax.broadcast_in_dim(of_tokens, bound.shape, (0, 1)))

        shape = WARPS, self._access(self.head).run, self.blocks.layout.width
        bounds = splat(shape, jnp.inf), splat(shape, -jnp.inf)
        if self.blocks.heads > 1:
            low, high = lax.fori_loop(0, self.heads, widen, bounds)
        else:
            low, high = widen(self.head, bounds)
        return whole(jnp.min, low), whole(jnp.max, high)


def _codes(
    x: jax.Array, scale: jax.Array, zero: jax.Array, middles: Sequence[jax.Array]
) -> jax.Array:
    """Return the index of the level nearest to (x - zero) / scale, the lower one on a tie."""
    y = (x - zero) / jnp.where(scale == 0, 1.0, scale)
    codes = jnp.zeros_like(y)
    for middle in middles:
        codes = jnp.where(y > middle, codes + 1.0, codes)
    # The lowest bits of 1.5 * 2^23 + code are those of the code (rounding.Job.levels).
    return codes + 1.5 * 2**23
