"""SQuat's options and presets. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, option, scale_dtype_option
from kvq_jax.methods.kivi import Kivi
from kvq_jax.methods.squat.codec import SquatCodec
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4)
# Appendix E.2: groups of 32 tokens and a residual length of 32 in all experiments, which is
# recent=0, block=32 here.
WINDOWS = "group_size=32,sink=0,recent=0,block=32"


@dataclasses.dataclass(frozen=True)
class _Squat(Method):
    """Keys per channel as in KIVI, but each block of channels is corrected for the errors of those
    before it, so that the whole error is nearly orthogonal to the prompt's queries. Values are as
    in KIVI.

    Source: Wang et al., SQuat, section 3.
    """

    source: ClassVar[str] = "SQuat (Wang et al. 2025), arXiv:2503.24358"
    reads_queries: ClassVar[bool] = True
    pre_rope: ClassVar[bool]

    bits: int | PerLayer = option(2, "bits of keys and values", choices=BITS, per_layer=True)
    group_size: int = option(0, "elements that share a scale (0: 32, or the largest divisor below)")
    rank: int = option(5, "dimensions of the query subspace, r")
    lam: float = option(0.001, "lambda, the weight of errors inside the subspace; 0 is KIVI")
    block_channels: int = option(
        0, "channels that are quantized between two corrections, g (0: half the head dim)"
    )
    normalize: bool = option(
        False, "divide the squared singular values by the prompt's length, with which they grow"
    )
    shared_subspace: bool = option(
        False,
        "the paper's sharing: all sequences of a batch take the subspace of the first (an"
        " experiment)",
    )
    scale_dtype: str = scale_dtype_option()

    def _kivi(self) -> Kivi:
        return Kivi(self.bits, self.group_size, self.pre_rope, self.scale_dtype)

    def windows(self) -> Windows:
        return self._kivi().windows()

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        plain = self._kivi().codec(side, layer, dims, block, dtype)
        channels, width = dims.head_dim, self.block_channels or (dims.head_dim + 1) // 2
        if not 1 <= self.rank <= channels:
            raise ValueError(f"rank={self.rank} must be between 1 and head_dim ({channels})")
        if not 0 <= self.lam < float("inf"):
            raise ValueError(f"lam={self.lam:g} must be finite and not negative")
        if width >= channels:
            raise ValueError(
                f"block_channels={width} leaves no channel to correct at head_dim {channels}: take"
                " less, or kivi"
            )
        if side == "v" or self.lam == 0:
            return plain
        codec = SquatCodec(
            side=side,
            format=plain.format,
            pre_rope=self.pre_rope,
            rank=self.rank,
            lam=self.lam,
            block_channels=width,
            normalize=self.normalize,
            shared=self.shared_subspace,
        )
        return self._with_queries(codec)

    @abc.abstractmethod
    def _with_queries(self, codec: SquatCodec) -> SquatCodec:
        """Return the codec with the options that choose the queries of its subspace."""


@dataclasses.dataclass(frozen=True)
class Squat(_Squat):
    """SQuat on keys after RoPE: the paper's main method."""

    name: ClassVar[str] = "squat"
    summary: ClassVar[str] = "KIVI's groups; key errors are kept orthogonal to the prompt's queries"
    pre_rope: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, str]] = {
        "lm-eval": f"rank=5,lam=0.001,block_channels=64,{WINDOWS}",
        "llama-2-7b-longbench": f"rank=40,lam=0.001,block_channels=64,{WINDOWS}",
        "llama-3.1-8b-longbench": f"rank=10,lam=0.0005,block_channels=64,{WINDOWS}",
        "mistral-7b-v0.3-longbench": f"rank=5,lam=0.001,block_channels=64,{WINDOWS}",
    }

    ahead: int = option(
        0,
        "positions after the prompt to which its queries are rotated before they span the subspace"
        " (0: their own)",
    )

    def _with_queries(self, codec: SquatCodec) -> SquatCodec:
        if self.ahead < 0:
            raise ValueError(f"ahead={self.ahead} must not be negative")
        if self.ahead and self.rotate:
            raise ValueError(
                f"ahead={self.ahead} turns queries by RoPE, which rotate=true does not leave in"
                " pairs: give one of them"
            )
        return dataclasses.replace(codec, ahead=self.ahead)


@dataclasses.dataclass(frozen=True)
class SquatPre(_Squat):
    """SQuat on keys before RoPE, which are rotated when read (the paper's SQuat^pre)."""

    name: ClassVar[str] = "squat_pre"
    summary: ClassVar[str] = "squat with keys cached before RoPE"
    pre_rope: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, str]] = {
        "lm-eval": f"rank=5,lam=0.001,block_channels=64,{WINDOWS}",
        "llama-2-7b-longbench": f"rank=5,lam=0.001,block_channels=32,{WINDOWS}",
        "llama-3.1-8b-longbench": f"rank=60,lam=0.0005,block_channels=32,{WINDOWS}",
        "mistral-7b-v0.3-longbench": f"rank=20,lam=0.0005,block_channels=64,{WINDOWS}",
    }

    queries: Literal["after_rope", "before_rope"] = option(
        "after_rope", "queries that span the subspace", choices=("after_rope", "before_rope")
    )

    def _with_queries(self, codec: SquatCodec) -> SquatCodec:
        return dataclasses.replace(codec, query_rope=self.queries == "after_rope")
