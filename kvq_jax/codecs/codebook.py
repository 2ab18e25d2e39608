"""The codec of formats with a fixed codebook (NormalFloat): each group of channels of a token is
scaled to its range."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvq_jax.arrays import codebook_array
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.codebook_array import CodebookArray, CodebookFormat
from kvq_jax.arrays.uniform import finite_range, saturation_limit
from kvq_jax.codecs import kernel_writers, kernels
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.codecs.facts import Facts, PaperCount
from kvq_jax.codecs.kernel_writers import KernelWriter
from kvq_jax.codecs.kernels import Kernels, table_of
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class CodebookCodec(OneSideCodec):
    """x^ = levels[code] * scale + zero, with half the range of a group and its middle."""

    side: Side
    format: CodebookFormat
    levels: tuple[float, ...]
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> CodebookArray:
        return codebook_array.specs(self.format, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> CodebookArray:
        group, dtype = self.format.group, self.format.scale_dtype
        assert group is not None, "a fixed codebook is scaled to groups"
        clean, low, high = finite_range(
            group.cut(rows.astype(jnp.float32)), ChannelGroup.AXES, saturation_limit(dtype)
        )
        scale, zero = codebook_array.half_range(group.stored(low), group.stored(high), dtype)
        levels = table_of(self.levels)
        return codebook_array.quantize(
            clean.reshape(rows.shape), self.format, levels, levels, scale, zero
        )

    def dequantize(self, params: Tree, stats: Tree, body: CodebookArray) -> CachedRows:
        return codebook_array.dequantize(body, table_of(self.levels))

    @property
    def facts(self) -> Facts:
        group, bits = self.format.group, self.format.bits
        # b + 32 / group: a 16-bit scale and a 16-bit zero point
        counted = None if group is None else bits + 32 / (group.heads * group.channels)
        return dataclasses.replace(
            super().facts,
            code_layout=self.format.layout,
            channel_group_bits=None if group is None else bits,
            paper=PaperCount(bits=None if counted is None else lambda *_: counted),
        )

    @property
    def kernels(self) -> Kernels:
        return kernels.of_codebook(
            self.format, self._kernel_arrays, self._kernel_writer, pre_rope=self.pre_rope
        )

    def _kernel_arrays(self, params: Tree, body: CodebookArray) -> list[Any]:
        return [*body.words, table_of(self.levels), body.scale, body.zero]

    def _kernel_writer(self, params: Tree, stats: Tree, prefill: bool) -> KernelWriter:
        levels = table_of(self.levels)
        return kernel_writers.table(self.format, levels, levels)
