"""Keys that were cached before RoPE, as warps read them: dequantized and turned in registers.

    score = q . R(position) k,     R(p + d) = R(p) R(d)    (readers/rotary.py)

A warp turns its queries back by the position p of its span's first token, and keys by their
distance d from there. So one table of SPAN distances, which a block copies to shared memory once,
serves all spans, and the cosines and sines of p come with each tile.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.codebook import ChannelKeys, CodebookKeys
from pallas_kernels.mosaic.grouped import GroupedKeys
from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.registers import ROWS, SIDE, WARPS
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.rotary import RotatedReader, angle_tables
from pallas_kernels.tiles.layout import SPAN


@dataclasses.dataclass(frozen=True)
class RotatedKeys:
    """Scores of a stripe of keys that `inner` dequantizes."""

    reader: RotatedReader
    inner: GroupedKeys

    @classmethod
    def of(cls, reader: RotatedReader, span: int) -> RotatedKeys:
        inner, kind = reader.inner, GroupedKeys
        if isinstance(inner, CodebookReader):
            kind = ChannelKeys if inner.affine == "channels" else CodebookKeys
        return cls(reader, kind.of(inner, span))

    @property
    def chunks(self) -> tuple[int, int]:
        return self.inner.chunks

    def query(self, q: jax.Array, stored: Sequence[jax.Array]) -> jax.Array:
        inner, _, factor, _ = self.reader.apart(stored)
        return self.inner.query(q * factor, inner)

    def constants(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        return self.inner.constants(self.reader.apart(stored)[0])

    def table(self, refs: Sequence[Any], ops: Matrices) -> Any:
        return self.inner.table(refs, ops)

    def opened(self, planes: Sequence[jax.Array], table: Any, ops: Matrices) -> Any:
        return planes, table

    def views(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the views of the other keys, and cosines and sines of the position of each span's
        first token, [1, 1, 2, spans, H / 2]."""
        inner, frequencies, _, starts = self.reader.apart(stored)
        turned_back = jnp.stack(angle_tables(frequencies, starts))
        return [*self.inner.views(inner), turned_back[None, None]]

    def fixed(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return cosines and sines of the distances in a span, the same for all heads, [1, 2, H / 2
        / SIDE, SPAN, SIDE]. The rows of a matrix lie side by side, so that loads of them have no
        bank of shared memory in common."""
        _, frequencies, _, _ = self.reader.apart(stored)
        tables = jnp.stack(angle_tables(frequencies, jnp.arange(SPAN, dtype=jnp.int32)))
        return [jnp.swapaxes(tables.reshape(1, 2, SPAN, -1, SIDE), 2, 3)]

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        of_spans = slots, 2, tokens // SPAN, arrays[-1].shape[4]
        inner = self.inner.buffers(arrays[:-1], slots, tokens, ops)
        return [*inner, plgpu.SMEM(of_spans, jnp.float16)]

    def copies(
        self, arrays: Sequence[Any], buffers: Sequence[Any], unit: Any, tokens: Any, slot: Any
    ) -> Iterator[tuple[Any, Any]]:
        (*inner, starts), (*stored, turned_back, _) = arrays, buffers
        yield from self.inner.copies(inner, stored, unit, tokens, slot)
        spans = pl.ds(lax.div(tokens.start, jnp.int32(SPAN)), tokens.size // SPAN)
        yield starts.at[0, 0, :, spans], turned_back.at[slot]

    def scores(
        self, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        """Return log2(e) / sqrt(H) * q . R(position) k of a stripe's tokens, [WARPS, SPAN,
        columns]. Scores of dead tokens may be anything."""
        planes, table = query
        *stored, turned_back, distances = buffers
        columns, half, width = planes[0].shape[1], len(planes) // 2, self.chunks[1]
        keys = self.inner.dequantized(stored, stripe, table, ops)
        total = splat((WARPS, ROWS, columns), 0.0)
        for c in range(half):
            channels, matrices = pl.ds(width * c, width), pl.ds(width // SIDE * c, width // SIDE)
            cos, sin = (
                ops.load_rows(turned_back.at[stripe.slot, i, stripe.spans, channels], columns)
                for i in range(2)
            )
            queries = ops.turned(planes[c], planes[half + c], cos, sin, back=True)
            cos, sin = (ops.load_matrices(distances.at[i, matrices]) for i in range(2))
            turned = ops.turned(keys(c), keys(half + c), cos, sin)
            for key, plane in zip(turned, queries, strict=True):
                total = ops.product(total, key, plane)
        return total
