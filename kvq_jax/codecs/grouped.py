"""The codec of every method that stores uniformly quantized groups: packed codes, a scale, perhaps
a zero point.

Such methods (KIVI, InnerQ, the int formats) differ in static choices: which rows, which axis is
grouped, which scheme. Attention dequantizes a chunk, code * scale + zero, and takes dots with it.
InnerQ's algebra, a scale on each partial dot product instead of each element,

    q . k = sum_g scale_g * (q_g . code_g) + zero_g * sum(q_g)

gives the same result. It suits kernels. In XLA on a CPU it is slower
(docs/decisions/streaming_attention.md).
"""

from __future__ import annotations

import dataclasses

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.codecs import kernels
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.codecs.facts import Facts, PaperCount, TokenGroup
from kvq_jax.codecs.kernels import Kernels
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class GroupedCodec(OneSideCodec):
    """x^ = code * scale + zero, in the groups of `format`."""

    side: Side
    format: GroupFormat
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        return grouped_array.specs(self.format, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> GroupedArray:
        return grouped_array.quantize(rows, self.format)

    def dequantize(self, params: Tree, stats: Tree, body: GroupedArray) -> CachedRows:
        return grouped_array.dequantize(body)

    @property
    def facts(self) -> Facts:
        format = self.format
        by_token = format.axis == "channels"
        # b + (16 + b) / group: a 16-bit scale, and a zero point of as many bits as a code
        counted = format.bits + (16 + format.bits) / (format.heads * format.group_size)
        return dataclasses.replace(
            super().facts,
            code_layout=format.layout,
            channel_group_bits=format.code_bits if by_token else None,
            token_group=None if by_token else TokenGroup(format.code_bits, format.group_size),
            paper=PaperCount(
                bits=(lambda *_: counted) if by_token and format.scheme == "asym" else None
            ),
        )

    @property
    def kernels(self) -> Kernels:
        return kernels.of_groups(self.format, pre_rope=self.pre_rope)
