"""The codec of every method that stores uniformly quantized groups: packed codes, a scale, perhaps
a zero point.

What differs between such methods (KIVI, InnerQ, the int formats) is static: which rows, which axis
is grouped, which scheme. Attention dequantizes a chunk, code * scale + zero, and takes dots with
it. InnerQ's algebra, a scale on each partial dot product instead of each element,

    q . k = sum_g scale_g * (q_g . code_g) + zero_g * sum(q_g)

gives the same result. It is for kernels: in XLA on a CPU it is slower
(docs/decisions/streaming_attention.md).
"""

from __future__ import annotations

import dataclasses

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.codecs import kernel_readers, native_bodies
from kvq_jax.codecs.base import KernelJob, Side
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class GroupedCodec(OneSideCodec):
    """x^ = code * scale + zero, groups as `format` says. `pre_rope` keys are cached before RoPE and
    rotated when read."""

    side: Side
    format: GroupFormat
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        return grouped_array.specs(self.format, batch, heads, tokens)

    def outlier_slots(self, heads: int) -> int:
        return 0

    def quantize(
        self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool
    ) -> GroupedArray:
        return grouped_array.quantize(rows, self.format)

    def dequantize(self, params: Tree, stats: Tree, body: GroupedArray) -> CachedRows:
        return grouped_array.dequantize(body)

    def kernel_reader(self) -> Reader | str:
        return kernel_readers.grouped(self)

    def native_body(self) -> Body | str:
        return native_bodies.grouped(self)

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        if self.format.heads > 1:
            return None  # the kernel quantizes one head at a time
        return KernelJob(self.format, self.format.scheme, None)

    @property
    def code_layout(self) -> PlaneLayout:
        return self.format.layout

    @property
    def channel_group_bits(self) -> int | None:
        return self.format.code_bits if self.format.axis == "channels" else None

    def paper_bits(self, width: int, context: int, *, pointers: bool) -> float | None:
        """Return b + (16 + b) / group: a 16-bit scale, and a zero point of as many bits as a
        code."""
        format = self.format
        if format.axis != "channels" or format.scheme != "asym":
            return None
        return format.bits + (16 + format.bits) / (format.heads * format.group_size)
