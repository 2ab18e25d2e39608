"""The codec of formats with a fixed codebook (NormalFloat): each group of channels of a token is
scaled to its range."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvq_jax.arrays import codebook_array
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.codebook_array import CodebookArray, CodebookFormat
from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.arrays.uniform import finite_range, saturation_limit
from kvq_jax.codecs import kernel_readers, kernel_writers, native_bodies
from kvq_jax.codecs.base import Side
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.kernel_writers import KernelWriter
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class CodebookCodec(OneSideCodec):
    """x^ = levels[code] * scale + zero: half the range of a group, and its middle. `pre_rope` keys
    are rotated when they are read."""

    side: Side
    format: CodebookFormat
    levels: tuple[float, ...]
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> CodebookArray:
        return codebook_array.specs(self.format, batch, heads, tokens)

    def outlier_slots(self, heads: int) -> int:
        return 0

    def quantize(
        self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool
    ) -> CodebookArray:
        group, dtype = self.format.group, self.format.scale_dtype
        assert group is not None, "a fixed codebook is scaled to groups"
        clean, low, high = finite_range(
            group.cut(rows.astype(jnp.float32)), ChannelGroup.AXES, saturation_limit(dtype)
        )
        scale, zero = codebook_array.half_range(group.stored(low), group.stored(high), dtype)
        levels = jnp.asarray(self.levels, jnp.float32)
        return codebook_array.quantize(
            clean.reshape(rows.shape), self.format, levels, levels, scale, zero
        )

    def dequantize(self, params: Tree, stats: Tree, body: CodebookArray) -> CachedRows:
        return codebook_array.dequantize(body, jnp.asarray(self.levels, jnp.float32))

    def kernel_reader(self) -> Reader | str:
        f = self.format
        return kernel_readers.nonuniform(
            f.layout, f.group, scale_dtype=f.scale_dtype, pre_rope=self.pre_rope
        )

    def kernel_writer(self, params: Tree, stats: Tree) -> KernelWriter | None:
        levels = jnp.asarray(self.levels, jnp.float32)
        return (
            None
            if isinstance(self.kernel_reader(), str)
            else kernel_writers.table(self.format, levels, levels)
        )

    def native_body(self) -> Body | str:
        f = self.format
        return native_bodies.nonuniform(
            f.layout, f.group, scale_dtype=f.scale_dtype, pre_rope=self.pre_rope
        )

    def kernel_arrays(self, params: Tree, body: CodebookArray) -> list[Any]:
        return [*body.words, jnp.asarray(self.levels, jnp.float32), body.scale, body.zero]

    @property
    def code_layout(self) -> PlaneLayout:
        return self.format.layout

    @property
    def channel_group_bits(self) -> int | None:
        return None if self.format.group is None else self.format.bits

    def paper_bits(self, width: int, context: int, *, pointers: bool) -> float | None:
        """Return b + 32 / group: a 16-bit scale and a 16-bit zero point."""
        group = self.format.group
        return None if group is None else self.format.bits + 32 / (group.heads * group.channels)
