"""The codec of rows that are divided by a second scale before their groups are quantized
(arrays/scaled_array.py)."""

from __future__ import annotations

import abc
import dataclasses

from jaxtyping import Array, Float

from kvq_jax.arrays import scaled_array
from kvq_jax.arrays.uniform import finite_rows, saturation_limit
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.facts import Facts, PaperCount
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class ScaledCodec(GroupedCodec):
    """x^ = (code * step + zero) * scale.

    share: the heads and the tokens that share a second scale.
    """

    share: tuple[int, int] = (1, 1)

    @abc.abstractmethod
    def second_scale(self, rows: Float[Array, "B K T H"]) -> Float[Array, "B scales S width"]:
        """Return the second scale of finite rows of whole blocks, of the shape that is stored."""

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        return scaled_array.specs(self.format, batch, heads, tokens, self.share)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        finite = finite_rows(rows, saturation_limit(self.format.scale_dtype))
        return scaled_array.quantize(finite, self.second_scale(finite), self.format)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return scaled_array.dequantize(body)

    @property
    def facts(self) -> Facts:
        couples = frozenset({"heads"}) if self.share[0] > 1 else frozenset()
        return dataclasses.replace(
            super().facts, requantizes="drifts", couples=couples, paper=PaperCount()
        )

    @property
    def kernels(self) -> Kernels:
        return unserved("no kernel reads a second scale beside groups")
