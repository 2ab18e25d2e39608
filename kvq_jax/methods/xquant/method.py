"""Options of XQuant and XQuant-CL. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kvq_jax.arrays.grouped_array import GroupedAxis, GroupFormat, resolve_group
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.dense import DenseCodec
from kvq_jax.methods.xquant.codec import OutlierChannel, Reading, XCodec, XCrossLayerCodec
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8, 16)
EXACT = 16  # bits that stand for full precision: the method without its quantization
GROUP = 128  # as in all experiments of the paper

Latent = Literal["auto", "true", "false"]
SOURCE = "XQuant (Tomar et al. 2025), arXiv:2508.10395"


@dataclasses.dataclass(frozen=True)
class _InputCache(Method):
    """The options and codecs that XQuant and XQuant-CL have in common."""

    source: ClassVar[str] = SOURCE
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it caches neither keys nor values

    group_size: int = option(
        0, "elements that share a scale (0: 128, or the largest divisor below)"
    )
    latent: Latent = option(
        "auto",
        "cache x U, with U from the SVD of the projections, instead of the layer's input x (auto:"
        " if that is narrower)",
        choices=("auto", "true", "false"),
    )
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=self.group_size or GROUP)

    def is_latent(self, dims: ModelDims) -> bool:
        if self.latent != "auto":
            return self.latent == "true"
        return dims.hidden_size >= 2 * dims.num_key_value_heads * dims.head_dim

    def stored(
        self,
        bits: int,
        channels: int,
        block: int,
        dtype: str,
        axis: GroupedAxis = "channels",
        outlier_channel: bool = False,
    ) -> Codec:
        """Return the codec that stores rows of `channels` channels."""
        if bits == EXACT:
            return DenseCodec("k", channels, dtype)
        size, what = (channels, "the row") if axis == "channels" else (block, "the block of tokens")
        group = resolve_group(self.group_size, size, what, GROUP)
        coded = GroupedCodec(
            "k", GroupFormat(bits, "asym", axis, group, channels, block, self.scale_dtype)
        )
        return OutlierChannel(coded, dtype) if outlier_channel else coded

    def plain(
        self, side: Side, bits: int, dims: ModelDims, block: int, dtype: str, outlier_channel: bool
    ) -> Codec:
        """Return XQuant's codec, which does not build on the layer below."""
        heads, wide = dims.num_key_value_heads, dims.hidden_size
        if not self.is_latent(dims):
            return XCodec(side, self.stored(bits, wide, block, dtype), wide, heads, latent=False)
        rank = min(wide, heads * dims.head_dim)
        stored = self.stored(
            bits,
            rank,
            block,
            dtype,
            "tokens" if side == "k" else "channels",
            outlier_channel and side == "k",
        )
        return XCodec(side, stored, rank, heads, latent=True)


@dataclasses.dataclass(frozen=True)
class XQuant(_InputCache):
    """Caches the layer's input, from which keys and values are rebuilt.

    Source: Tomar et al., XQuant, sections 3.1 and 3.3.1.
    """

    name: ClassVar[str] = "xquant"
    summary: ClassVar[str] = (
        "the layer's input, or its latents if heads are shared; keys and values are rebuilt from it"
    )

    bits: int | PerLayer = option(
        4, "bits of the cached rows (16: full precision)", choices=BITS, per_layer=True
    )
    exact_outlier_channel: bool = option(
        False, "keep the first latent channel of keys in full precision (Appendix B)"
    )

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        if self.exact_outlier_channel and not self.is_latent(dims):
            raise ValueError(
                "exact_outlier_channel=true is about latents of keys; xquant caches the layer's"
                " input of this model"
            )
        bits = at_layer(self.bits, layer)
        return self.plain(side, bits, dims, block, dtype, self.exact_outlier_channel)


@dataclasses.dataclass(frozen=True)
class XQuantCL(_InputCache):
    """From a base layer on, each layer caches the difference between its input and the input of the
    layer below.

    Source: Tomar et al., XQuant, sections 3.2, 3.3.2 and 4.3.
    """

    name: ClassVar[str] = "xquant_cl"
    summary: ClassVar[str] = (
        "differences between the inputs of successive layers, from a base layer on; keys and values"
        " are rebuilt"
    )

    bits: int | PerLayer = option(
        2, "bits of the differences (16: full precision)", choices=BITS, per_layer=True
    )
    base_layer: int = option(
        2, "the layer whose input starts the accumulator; earlier ones are plain xquant"
    )
    base_bits: int = option(4, "bits of the base layer's input", choices=BITS)
    early_bits: int | PerLayer = option(
        4, "bits of the layers before the base", choices=BITS, per_layer=True
    )
    accumulator_dtype: str = option(
        "float32",
        "dtype of the accumulator, which is working memory",
        choices=("float32", "bfloat16"),
    )
    reading: Reading = option(
        "post_norm",
        "accumulate the normalized input (the paper's text), the same without gains, or the"
        " residual stream (its figures)",
        choices=("post_norm", "unit_norm", "residual_stream"),
    )

    def carries_from(self) -> int:
        return self.base_layer

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        residual = self.reading == "residual_stream"
        if residual and self.latent == "true":
            raise ValueError(
                "reading=residual_stream needs latent=false: normalization comes after the sum, so"
                " no latent is enough"
            )
        if layer < self.base_layer:
            return self.plain(
                side, at_layer(self.early_bits, layer), dims, block, dtype, outlier_channel=False
            )
        base, wide = layer == self.base_layer, dims.hidden_size
        latent = not base and not residual and self.is_latent(dims)
        channels = min(wide, 2 * dims.num_key_value_heads * dims.head_dim) if latent else wide
        stored = self.stored(
            self.base_bits if base else at_layer(self.bits, layer), channels, block, dtype
        )
        return XCrossLayerCodec(
            side,
            stored,
            channels,
            dims.num_key_value_heads,
            latent,
            width=wide,
            base=base,
            reading=self.reading,
            accumulator_dtype=self.accumulator_dtype,
        )
