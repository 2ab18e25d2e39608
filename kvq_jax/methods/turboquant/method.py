"""TurboQuant's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.rotating import rotated
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.turboquant.codec import SphereCodec
from kvq_jax.methods.turboquant.levels import sphere_levels
from kvq_jax.types.array_types import ModelDims

BITS = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class TurboQuant(Method):
    """A random rotation of each key and value, its norm, and Lloyd-Max levels of a unit vector's
    coordinates: the MSE variant.

    Source: Zandieh et al., TurboQuant, section 3.1 and Algorithm 1.
    """

    name: ClassVar[str] = "turboquant"
    summary: ClassVar[str] = (
        "keys and values rotated at random, the norm of each, and levels that suit a unit vector's"
        " coordinates"
    )
    source: ClassVar[str] = "TurboQuant (Zandieh et al. 2025), arXiv:2504.19874"
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it always does

    bits: int | PerLayer = option(3, "bits of keys and values", choices=BITS, per_layer=True)
    pre_rope: bool = option(False, "cache keys before RoPE")
    scale_dtype: str = scale_dtype_option("norms")

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        bits, channels = at_layer(self.bits, layer), dims.head_dim
        format = CodebookFormat(
            bits,
            channels,
            block,
            ChannelGroup(1, channels),
            scale_dtype=self.scale_dtype,
            stores_zero=False,
        )
        return rotated(
            SphereCodec(side, format, sphere_levels(bits, channels), self.pre_rope and side == "k")
        )
