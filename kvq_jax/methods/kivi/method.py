"""KIVI's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.arrays.grouped_array import GroupFormat, resolve_group
from kvq_jax.codecs.codec import Side
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class Kivi(Method):
    """Asymmetric groups, over tokens for keys (per channel) and over channels for values (per
    token).

    Source: Liu et al., KIVI, section 3.2.
    """

    name: ClassVar[str] = "kivi"
    summary: ClassVar[str] = (
        "keys per channel over groups of tokens, values per token over groups of channels,"
        " asymmetric"
    )
    source: ClassVar[str] = "KIVI (Liu et al. 2024), arXiv:2402.02750"

    bits: int | PerLayer = option(2, "bits of keys and values", choices=BITS, per_layer=True)
    group_size: int = option(0, "elements that share a scale (0: 32, or the largest divisor below)")
    pre_rope: bool = option(False, "cache keys before RoPE (the XQuant paper's KIVI*)")
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=0, recent=96, block=self.group_size or 32)

    def codec(
        self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str
    ) -> GroupedCodec:
        bits = at_layer(self.bits, layer)
        if side == "k":
            group = resolve_group(self.group_size, block, "the block of tokens")
            format = GroupFormat(
                bits, "asym", "tokens", group, dims.head_dim, block, self.scale_dtype
            )
            return GroupedCodec("k", format, self.pre_rope)
        group = resolve_group(self.group_size, dims.head_dim, "head_dim")
        return GroupedCodec(
            "v",
            GroupFormat(bits, "asym", "channels", group, dims.head_dim, block, self.scale_dtype),
        )
