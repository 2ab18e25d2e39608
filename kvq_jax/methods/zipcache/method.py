"""ZipCache's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.layer.attention import of_layer
from kvq_jax.methods.base import Method, Windows, option, scale_dtype_option
from kvq_jax.methods.zipcache.codec import MASK_BITS, ZipCodec
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class ZipCache(Method):
    """Salient tokens in more bits than the others, keys per channel, and values per token and
    normalized by channel.

    Source: He et al., ZipCache, section 4.
    """

    name: ClassVar[str] = "zipcache"
    summary: ClassVar[str] = (
        "tokens that the prompt's probes attend to most in more bits, keys per channel, values per"
        " token"
    )
    source: ClassVar[str] = "ZipCache (He et al. 2024), arXiv:2405.14256"
    reads_queries: ClassVar[bool] = True
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # keys and values share a row

    salient_bits: int = option(4, "bits of salient tokens", choices=BITS)
    other_bits: int = option(2, "bits of the other tokens", choices=BITS)
    unimportant_ratio: float = option(
        0.4, "share of the tokens of a block that are not salient, rounded to 8 tokens"
    )
    probes: int = option(
        64, "queries of the prompt that tell which tokens are salient, half of them its last"
    )
    scale_dtype: str = scale_dtype_option("scales, zero points and norms")

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=128)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        if block % MASK_BITS or block < 2 * MASK_BITS:
            raise ValueError(
                f"block={block} must be a multiple of {MASK_BITS}, and at least {2 * MASK_BITS}"
            )
        others = MASK_BITS * round(self.unimportant_ratio * block / MASK_BITS)
        if not 0 < others < block:
            raise ValueError(
                f"unimportant_ratio={self.unimportant_ratio:g} leaves one kind of tokens in blocks"
                f" of {block}: take kivi"
            )
        if not self.probes:
            raise ValueError("probes=0 tells nothing of any token: take at least 1")
        group = dims.num_attention_heads // dims.num_key_value_heads
        bits = self.salient_bits, self.other_bits
        return ZipCodec(
            side,
            dims.head_dim,
            group,
            block,
            bits,
            block - others,
            self.probes,
            self.scale_dtype,
            of_layer(getattr(dims, "attention", ()), layer),
        )
