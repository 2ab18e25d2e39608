"""The options of product quantization. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option
from kvq_jax.methods.pq.codec import ProductCodec
from kvq_jax.types.array_types import ModelDims

CODE_BITS = tuple(range(4, 11))
GROUP = 8  # channels, at most, if the spec leaves them open


@dataclasses.dataclass(frozen=True)
class ProductQuantization(Method):
    """One code for each group of channels, which names a vector of the group's codebook.

    Source: Jegou et al., Product Quantization for Nearest Neighbor Search (2011); for keys and
    values: CommVQ, LOOKAT and AttnVQ.
    """

    name: ClassVar[str] = "pq"
    summary: ClassVar[str] = (
        "one code for each group of channels, from codebooks learned by k-means (needs kvq"
        " calibrate)"
    )
    source: ClassVar[str] = (
        "product quantization (Jegou et al. 2011), as in CommVQ (arXiv:2506.18879)"
    )

    code_bits: int | PerLayer = option(8, "bits of a code", choices=CODE_BITS, per_layer=True)
    group_size: int | PerLayer = option(
        0,
        "channels that share a code, whole RoPE pairs (0: 8, or the largest that divide head_dim)",
        per_layer=True,
    )
    pre_rope: bool = option(True, "cache keys before RoPE; false scores keys by look-up tables")

    def windows(self) -> Windows:
        return Windows(sink=32, recent=96, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        channels = dims.head_dim
        group = at_layer(self.group_size, layer) or max(
            size for size in (2, 4, 6, GROUP) if channels % size == 0 or size == 2
        )
        if group < 2 or group % 2 or channels % group:
            raise ValueError(
                f"group_size={group} must be even and divide head_dim {channels}: a group is whole"
                " RoPE pairs"
            )
        bits = at_layer(self.code_bits, layer)
        return ProductCodec(side, channels, group, bits, block, self.pre_rope and side == "k")
