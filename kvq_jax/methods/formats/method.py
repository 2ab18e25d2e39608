"""int2 to int8 and nf2 to nf4: plain number formats, scaled for each token or group of its channels. Equations: README.md beside this
file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.array_types import ModelDims
from kvq_jax.arrays.channel_groups import channel_group
from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.codebooks import normal_float_levels
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.codecs.base import Codec, Side
from kvq_jax.codecs.codebook import CodebookCodec
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.methods.base import Method, Windows, option


@dataclasses.dataclass(frozen=True)
class TokenFormat(Method):
    """A number format whose range is that of a token, or of a group of its channels."""

    source: ClassVar[str] = "baselines of KVQuant (Hooper et al. 2024), arXiv:2401.18079"
    bits: ClassVar[int]

    group_size: int = option(0, "channels that share a range (0: a token's whole KV width; ATOM uses 128, FlexGen 64)")
    pre_rope: bool = option(False, "cache keys before RoPE")
    scale_dtype: str = option("float16", "dtype of scales and zeros", choices=("float16", "bfloat16", "float32"))

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=32)


@dataclasses.dataclass(frozen=True)
class Integer(TokenFormat):
    """Asymmetric integers with an unrounded zero point."""

    summary: ClassVar[str] = "integers of each token's range, keys and values alike"

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        group = channel_group(self.group_size, dims.num_key_value_heads, dims.head_dim)
        format = GroupFormat(self.bits, "asym", "channels", group.channels, dims.head_dim, block, self.scale_dtype, group.heads)
        return GroupedCodec(side, format, self.pre_rope and side == "k")


@dataclasses.dataclass(frozen=True)
class NormalFloat(TokenFormat):
    """Levels at the quantiles of a normal distribution. Dettmers et al., QLoRA."""

    summary: ClassVar[str] = "NormalFloat levels of each token's range, keys and values alike"

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        group = channel_group(self.group_size, dims.num_key_value_heads, dims.head_dim)
        format = CodebookFormat(self.bits, dims.head_dim, block, group, scale_dtype=self.scale_dtype)
        return CodebookCodec(side, format, normal_float_levels(self.bits), self.pre_rope and side == "k")


@dataclasses.dataclass(frozen=True)
class Int2(Integer):
    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True)
class Int3(Integer):
    name: ClassVar[str] = "int3"
    bits: ClassVar[int] = 3


@dataclasses.dataclass(frozen=True)
class Int4(Integer):
    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


@dataclasses.dataclass(frozen=True)
class Int8(Integer):
    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True)
class NF2(NormalFloat):
    name: ClassVar[str] = "nf2"
    bits: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True)
class NF3(NormalFloat):
    name: ClassVar[str] = "nf3"
    bits: ClassVar[int] = 3


@dataclasses.dataclass(frozen=True)
class NF4(NormalFloat):
    name: ClassVar[str] = "nf4"
    bits: ClassVar[int] = 4


INT_METHODS: tuple[type[Method], ...] = (Int2, Int3, Int4, Int8)
NORMAL_FLOAT_METHODS: tuple[type[Method], ...] = (NF2, NF3, NF4)
