"""Plain number formats, int2 to int8 and nf2 to nf4, with a range for each token or group of its
channels.

Equations and deviations: README.md beside this file.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kvq_jax.arrays.channel_groups import channel_group
from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.codebooks import normal_float_levels
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.codecs.codebook import CodebookCodec
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.methods.base import Method, Windows, option, scale_dtype_option
from kvq_jax.types.array_types import ModelDims

Levels = Literal["int", "nf"]
LEVELS: dict[Levels, str] = {"int": "integers", "nf": "NormalFloat levels"}


@dataclasses.dataclass(frozen=True)
class TokenFormat(Method):
    """Codes of `bits` bits over the range of a token, or of a group of its channels.

    levels: "int", asymmetric integers with an unrounded zero point, or "nf", a codebook of
    quantiles of a normal distribution (Dettmers et al., QLoRA). `levels` and `bits` are not options
    but part of the method's name, such as int4 or nf4.
    """

    source: ClassVar[str] = "baselines of KVQuant (Hooper et al. 2024), arXiv:2401.18079"

    levels: Levels
    bits: int
    group_size: int = option(
        0, "channels that share a range (0: a token's whole KV width; ATOM uses 128, FlexGen 64)"
    )
    pre_rope: bool = option(False, "cache keys before RoPE")
    scale_dtype: str = scale_dtype_option()

    # One class serves seven names.
    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.levels}{self.bits}"

    @property
    def summary(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{LEVELS[self.levels]} over each token's range, keys and values alike"

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        group = channel_group(self.group_size, dims.num_key_value_heads, dims.head_dim)
        before_rope = self.pre_rope and side == "k"
        if self.levels == "nf":
            levels = CodebookFormat(
                self.bits, dims.head_dim, block, group, scale_dtype=self.scale_dtype
            )
            return CodebookCodec(side, levels, normal_float_levels(self.bits), before_rope)
        integers = GroupFormat(
            self.bits,
            "asym",
            "channels",
            group.channels,
            dims.head_dim,
            block,
            self.scale_dtype,
            group.heads,
        )
        return GroupedCodec(side, integers, before_rope)
