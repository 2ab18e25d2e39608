"""Rows in full precision, as warps read them: straight from shared memory into a tensor core's
operand.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.registers import WARPS
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.readers.dense import DenseReader
from pallas_kernels.readers.shared import LOG2E

WIDTH = 32  # channels whose sums the warps merge together


@dataclasses.dataclass(frozen=True)
class DenseSide:
    """The stored rows of one side, and their buffers in shared memory.

    span: the tokens of a warp.
    """

    reader: DenseReader
    span: int

    @classmethod
    def of(cls, reader: DenseReader, span: int) -> Any:
        return cls(reader, span)

    @property
    def chunks(self) -> tuple[int, int]:
        return self.reader.channels // WIDTH, WIDTH

    @property
    def weights_dtype(self) -> Any:
        return jnp.dtype(self.reader.dtype)

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return []

    def table(self, refs: Sequence[Any], ops: Matrices) -> None:
        return None

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return list(stored)

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        return [ops.buffer(slots, tokens, self.reader.channels, rows.dtype) for rows in arrays]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        yield arrays[0].at[*unit, tokens], buffers[0].at[slot]

    def _rows(
        self, buffers: Sequence[Any], stripe: Stripe, ops: Matrices, transposed: bool
    ) -> jax.Array:
        """Load the rows of each warp's tokens, [WARPS, span, H], or the transpose."""
        tokens = buffers[0].at[stripe.slot, stripe.tokens]
        return ops.load_tile(tokens, self.span, self.weights_dtype, transposed)

    def _chunk(self, chunk: int) -> slice:
        return slice(WIDTH * chunk, WIDTH * (chunk + 1))


class DenseKeys(DenseSide):
    """Scores of a stripe."""

    def query(self, q: jax.Array, stored: Sequence[jax.Array]) -> jax.Array:
        """Return queries [B, K, columns, H] in chunks [B, K, chunks, columns, WIDTH]."""
        batch, heads, columns, channels = q.shape
        scaled = (q * (LOG2E * channels**-0.5)).astype(self.weights_dtype)
        return jnp.moveaxis(scaled.reshape(batch, heads, columns, *self.chunks), 3, 2)

    def opened(self, planes: Sequence[jax.Array], table: None, ops: Matrices) -> Any:
        return planes

    def scores(
        self, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        """Return log2(e) / sqrt(H) * q . k of a stripe's tokens, [WARPS, span, columns]. Scores of
        dead tokens may be anything."""
        rows = self._rows(buffers, stripe, ops, transposed=False)
        total = splat((WARPS, self.span, query[0].shape[1]), 0.0)
        for c, plane in enumerate(query):
            total = ops.product(total, rows[:, :, self._chunk(c)], plane)
        return total


class DenseValues(DenseSide):
    """Weighted values of a stripe."""

    def weigh(
        self,
        weights: jax.Array,
        buffers: Sequence[Any],
        stripe: Stripe,
        sums: Sequence[jax.Array],
        table: None,
        ops: Matrices,
    ) -> list[jax.Array]:
        """Add a stripe's values to `sums` [WARPS, WIDTH, columns], one for each chunk, weighted by
        [WARPS, columns, span] in their dtype. Weights of dead tokens are 0."""
        rows = stripe.zero_dead(self._rows(buffers, stripe, ops, transposed=True), 2)
        return [ops.product(x, rows[:, self._chunk(c)], weights) for c, x in enumerate(sums)]
