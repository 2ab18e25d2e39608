"""OSCAR's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.arrays.grouped_array import GroupFormat, resolve_group
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.oscar_spectral.codec import SpectralCodec
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8)
GROUP = 128  # channels, at most


@dataclasses.dataclass(frozen=True)
class OscarSpectral(Method):
    """Keys and values turned by a rotation fitted to what attention takes from them, clipped, in
    asymmetric groups of a token's channels.

    The queries that the paper fits keys' rotations to are not recorded: gradients of the loss with
    respect to keys, which are sums of queries, stand in for them.

    Source: Zhou et al., OSCAR, and its public code.
    """

    name: ClassVar[str] = "oscar_spectral"
    summary: ClassVar[str] = (
        "keys and values per token, in a calibrated rotation of each head, clipped (needs kvq"
        " calibrate)"
    )
    source: ClassVar[str] = "OSCAR (Zhou et al. 2026), arXiv:2605.17757"
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it always does

    bits: int | PerLayer = option(2, "bits of keys and values", choices=BITS, per_layer=True)
    group_size: int = option(
        0, "channels that share a step (0: 128, or the largest divisor of head_dim below)"
    )
    k_kept: float = option(0.96, "share of a key's magnitudes that are not clipped (0: all)")
    v_kept: float = option(0.92, "the same of a value's")
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=64, recent=256, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        kept = self.k_kept if side == "k" else self.v_kept
        if not 0 <= kept <= 1:
            raise ValueError(f"{side}_kept={kept:g}: a share is between 0 and 1")
        bits, channels = at_layer(self.bits, layer), dims.head_dim
        group = resolve_group(self.group_size, channels, "head_dim", GROUP)
        format = GroupFormat(bits, "asym", "channels", group, channels, block, self.scale_dtype)
        return SpectralCodec(side, format, kept=kept)
