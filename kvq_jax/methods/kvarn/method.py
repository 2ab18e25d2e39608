"""KVarN's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.arrays.grouped_array import GroupFormat, resolve_group
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.rotating import rotated
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.kvarn.codec import KVarNCodec
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class KVarN(Method):
    """Rotated tiles of a block of tokens, scaled along both axes to equal variance, then rounded:
    keys per channel, values per token.

    Source: Mueller et al., KVarN, and its public code.
    """

    name: ClassVar[str] = "kvarn"
    summary: ClassVar[str] = (
        "rotated keys per channel and values per token, after tokens and channels of a block are"
        " scaled to equal variance"
    )
    source: ClassVar[str] = "KVarN (Mueller et al. 2026), arXiv:2606.03458"
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it always does

    bits: int | PerLayer = option(
        2,
        "bits of keys and values (k=kvarn:bits=4+v=kvarn:bits=2 is K4V2)",
        choices=BITS,
        per_layer=True,
    )
    group_size: int = option(128, "tokens of a tile, which divide the block")
    floor: float = option(
        0.0, "least scale of a token of keys or a channel of values (the public code: 0.741)"
    )
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=128, recent=0, block=128)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        tile = resolve_group(self.group_size, block, "the block of tokens")
        if tile < 2 or dims.head_dim < 2:
            raise ValueError(
                f"group_size={tile}, head_dim={dims.head_dim}: a variance takes 2 tokens and 2"
                " channels"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor:g}: the least scale is between 0 and 1")
        bits, channels = at_layer(self.bits, layer), dims.head_dim
        axis, group, share = ("tokens", tile, 1) if side == "k" else ("channels", channels, tile)
        format = GroupFormat(bits, "asym", axis, group, channels, block, self.scale_dtype)
        return rotated(KVarNCodec(side, format, share=(1, share), tile=tile, floor=self.floor))
