"""KVQuant's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kvq_jax.arrays.channel_groups import channel_group
from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.sparse_outliers import outliers_per_side, pool_of
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option
from kvq_jax.methods.kvquant.codec import Datatype, KVQuantCodec, Weighting
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4)


@dataclasses.dataclass(frozen=True)
class KVQuant(Method):
    """Keys before RoPE with calibrated ranges of channels, values with ranges of tokens, calibrated
    codebooks, outliers in full precision.

    Source: Hooper et al., KVQuant, section 3.
    """

    name: ClassVar[str] = "kvquant"
    summary: ClassVar[str] = (
        "calibrated codebooks, full-precision outliers; keys per channel before RoPE, values per"
        " token (needs kvq calibrate)"
    )
    source: ClassVar[str] = "KVQuant (Hooper et al. 2024), arXiv:2401.18079"

    bits: int | PerLayer = option(4, "bits of keys and values", choices=BITS, per_layer=True)
    outliers: float = option(
        0.01,
        "fraction of each token's KV width kept in full precision, rounded up to whole values on"
        " both sides",
    )
    datatype: Datatype = option(
        "nuq", "codebook: calibrated, NormalFloat or equally spaced", choices=("nuq", "nf", "int")
    )
    weighting: Weighting = option(
        "fisher_scale",
        "weight of an element when codebooks are calibrated: Fisher x scale^2 (Appendix E), Fisher,"
        " or none",
        choices=("fisher_scale", "fisher", "none"),
    )
    qnorm: bool = option(
        False,
        "shift and stretch the codebook so that mean and standard deviation survive (needs"
        " datatype=nuq)",
    )
    pre_rope: bool = option(True, "cache keys before RoPE")
    k_axis: Literal["channel", "token"] = option(
        "channel", "keys of a channel, or of a token, share a range", choices=("channel", "token")
    )
    v_axis: Literal["channel", "token"] = option(
        "token", "values of a channel, or of a token, share a range", choices=("channel", "token")
    )
    thresholds: Literal["vector", "matrix"] = option(
        "vector",
        "look for outliers in each channel or token, or in the whole layer",
        choices=("vector", "matrix"),
    )
    channel_ranges: Literal["calibrated", "prompt"] = option(
        "calibrated",
        "take ranges and thresholds of channels from the calibration text, or from each sequence's"
        " own prompt (Table 14's online)",
        choices=("calibrated", "prompt"),
    )
    slots: float = option(
        2.25,
        "slots for outliers by calibrated thresholds, as a multiple of the number that `outliers`"
        " gives",
    )
    scale_dtype: str = option(
        "float16", "dtype of the scales and zero points of tokens", choices=("float16", "float32")
    )

    @property
    def online(self) -> bool:
        return self.channel_ranges == "prompt"

    def windows(self) -> Windows:
        return Windows(sink=1, recent=0, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        if self.qnorm and self.datatype != "nuq":
            raise ValueError(f"qnorm=true needs datatype=nuq, not {self.datatype}")
        if self.online and self.thresholds == "matrix":
            raise ValueError(
                "channel_ranges=prompt needs thresholds=vector: a prompt's thresholds are found by"
                " channel"
            )
        if not self.slots:
            raise ValueError("slots=0 leaves no place for outliers: outliers=0 turns them off")
        heads, head_dim = dims.num_key_value_heads, dims.head_dim
        bits = at_layer(self.bits, layer)
        axis = self.k_axis if side == "k" else self.v_axis
        group = channel_group(0, heads, head_dim) if axis == "token" else None
        width = heads * head_dim
        per_side = outliers_per_side(self.outliers, width)
        # With static thresholds the data decide how many outliers a token has.
        static = axis == "channel" or self.thresholds == "matrix"
        outliers = self.outliers if static or per_side else 0.0
        # Tokens that share slots can have less than one each.
        of_paper = 2 * per_side or outliers * width
        per_token = min(of_paper * (self.slots if static else 1), width)
        pool = pool_of(block, per_token, head_dim, static) if outliers else None
        return KVQuantCodec(
            side=side,
            format=CodebookFormat(bits, head_dim, block, group, pool, self.scale_dtype),
            datatype=self.datatype,
            weighting=self.weighting,
            outliers=outliers,
            per_side=per_side,
            per_matrix=self.thresholds == "matrix",
            qnorm=self.qnorm,
            pre_rope=self.pre_rope and side == "k",
            online=self.online and axis == "channel",
            unmet_outliers=None if outliers == self.outliers else self.outliers,
        )
