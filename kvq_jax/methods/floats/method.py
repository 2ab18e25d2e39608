"""The number formats that inference engines ship for KV caches: fp8, mxfp4, nvfp4. Equations and
deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.arrays.float_array import FloatFormat, ScaleKind
from kvq_jax.arrays.minifloats import E2M1, E4M3, Minifloat
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, Windows, option
from kvq_jax.methods.floats.codec import FloatCodec, Scale
from kvq_jax.types.array_types import ModelDims

SCALES = ("tensor", "head", "none")
SCALE_HELP = (
    "scale of a sequence, from its prompt: one for all heads of keys or values of a layer, one for"
    " each head, or none. For fp8, tensor means the checkpoint's scales if it brings any"
)


@dataclasses.dataclass(frozen=True)
class _Floats(Method):
    """Small floats, coded token by token."""

    element: ClassVar[Minifloat]
    block_scale: ClassVar[ScaleKind] = "none"
    block_channels: ClassVar[int] = 0

    pre_rope: bool = option(False, "cache keys before RoPE")

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        if self.block_channels and dims.head_dim % self.block_channels:
            raise ValueError(
                f"{self.name} has blocks of {self.block_channels} channels, which do not divide"
                f" head_dim {dims.head_dim}"
            )
        format = FloatFormat(
            self.element, dims.head_dim, block, self.block_scale, self.block_channels
        )
        before_rope = self.pre_rope and side == "k"
        scale = self._scale_of(dims, plain=not (before_rope or self.rotate))
        return FloatCodec(side, format, scale, before_rope)

    def _scale_of(self, dims: ModelDims, *, plain: bool) -> Scale:
        """Return the scale for a model. `plain`: keys after RoPE, or values, are coded."""
        return "none"


@dataclasses.dataclass(frozen=True)
class _ScaledBySequence(_Floats):
    """Small floats under a scale of the sequence."""

    scale: Scale = option("tensor", SCALE_HELP, choices=SCALES)

    def _scale_of(self, dims: ModelDims, *, plain: bool) -> Scale:
        return self.scale


@dataclasses.dataclass(frozen=True)
class FP8(_ScaledBySequence):
    """E4M3 numbers, scaled by one number for a sequence."""

    name: ClassVar[str] = "fp8"
    summary: ClassVar[str] = (
        "8-bit floats (E4M3), scaled by one number for each sequence: what inference engines call"
        " an fp8 KV cache"
    )
    source: ClassVar[str] = "OCP 8-bit Floating Point Specification 1.0 (2023)"
    element: ClassVar[Minifloat] = E4M3

    def _scale_of(self, dims: ModelDims, *, plain: bool) -> Scale:
        brought = plain and self.scale == "tensor" and getattr(dims, "kv_scales", False)
        return "checkpoint" if brought else self.scale


@dataclasses.dataclass(frozen=True)
class MXFP4(_Floats):
    """E2M1 numbers in blocks of 32 channels that share a power of two."""

    name: ClassVar[str] = "mxfp4"
    summary: ClassVar[str] = (
        "4-bit floats (E2M1), blocks of 32 channels of a token share a power of two"
    )
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification 1.0 (2023)"
    element: ClassVar[Minifloat] = E2M1
    block_scale: ClassVar[ScaleKind] = "e8m0"
    block_channels: ClassVar[int] = 32


@dataclasses.dataclass(frozen=True)
class NVFP4(_ScaledBySequence):
    """E2M1 numbers in blocks of 16 channels that share an E4M3 scale, and one fp32 scale for a
    sequence."""

    name: ClassVar[str] = "nvfp4"
    summary: ClassVar[str] = (
        "4-bit floats (E2M1), blocks of 16 channels of a token share an E4M3 scale, and a sequence"
        " an fp32 one"
    )
    source: ClassVar[str] = "NVFP4 (NVIDIA 2025, Blackwell's 4-bit format)"
    element: ClassVar[Minifloat] = E2M1
    block_scale: ClassVar[ScaleKind] = "e4m3"
    block_channels: ClassVar[int] = 16
