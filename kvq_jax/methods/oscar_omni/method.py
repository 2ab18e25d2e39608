"""OScaR's codec of keys and its options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.arrays.grouped_array import GroupFormat, resolve_group
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.rotating import rotated
from kvq_jax.codecs.scaled import ScaledCodec
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8)
MIN_SCALE = 2.0**-24  # of a scale, for tokens of zeros


@dataclasses.dataclass(frozen=True)
class TokenSizeCodec(ScaledCodec):
    """(code * step + zero) * s. s is the root of the mean square of a token over all KV heads, from
    which the paper's norm differs by a constant."""

    def second_scale(self, rows: Float[Array, "B K T H"]) -> Float[Array, "B 1 T 1"]:
        return jnp.maximum(jnp.sqrt(jnp.mean(rows**2, axis=(1, 3), keepdims=True)), MIN_SCALE)


@dataclasses.dataclass(frozen=True)
class OscarOmni(Method):
    """KIVI's groups of rotated keys and values, keys divided by the size of their token first.

    Source: Su et al., OScaR, and its public code.
    """

    name: ClassVar[str] = "oscar_omni"
    summary: ClassVar[str] = (
        "rotated keys per channel, divided by the size of their token, and rotated values per token"
    )
    source: ClassVar[str] = "OScaR (Su et al. 2026), arXiv:2605.19660"
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it always does

    bits: int | PerLayer = option(2, "bits of keys and values", choices=BITS, per_layer=True)
    group_size: int = option(0, "elements that share a step (0: 32, or the largest divisor below)")
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=0, recent=96, block=self.group_size or 32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        bits, channels = at_layer(self.bits, layer), dims.head_dim
        if side == "v":
            group = resolve_group(self.group_size, channels, "head_dim")
            format = GroupFormat(bits, "asym", "channels", group, channels, block, self.scale_dtype)
            return rotated(GroupedCodec("v", format))
        group = resolve_group(self.group_size, block, "the block of tokens")
        format = GroupFormat(bits, "asym", "tokens", group, channels, block, self.scale_dtype)
        return rotated(TokenSizeCodec("k", format, share=(dims.num_key_value_heads, 1)))
