"""OptR's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvq_jax.arrays.grouped_array import GroupFormat, resolve_group
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.optr.codec import OutputAwareCodec
from kvq_jax.methods.optr.fit import Rounding
from kvq_jax.methods.oscar_spectral.method import BITS, GROUP
from kvq_jax.types.array_types import ModelDims


@dataclasses.dataclass(frozen=True)
class OptR(Method):
    """OSCAR's cache in rotations that are corrected by gradient descent on the error that attention
    makes after the output projection, with keys minus their mean.

    Source: Yun et al., OptR, and its public code.
    """

    name: ClassVar[str] = "optr"
    summary: ClassVar[str] = (
        "keys without their mean and values per token, in rotations learned for the layer's output"
        " (needs kvq calibrate)"
    )
    source: ClassVar[str] = "OptR (Yun et al. 2026), arXiv:2608.02691"
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it always does

    bits: int | PerLayer = option(2, "bits of keys and values", choices=BITS, per_layer=True)
    group_size: int = option(
        0, "channels that share a step (0: 128, or the largest divisor of head_dim below)"
    )
    base: str = option("oscar", "the rotations that are corrected", choices=("oscar", "hadamard"))
    steps: int = option(80, "steps of gradient descent (0: the base alone)")
    k_kept: float = option(0.96, "share of a key's magnitudes that are not clipped (0: all)")
    v_kept: float = option(0.92, "the same of a value's")
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=64, recent=256, block=32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        for name, kept in (("k_kept", self.k_kept), ("v_kept", self.v_kept)):
            if not 0 <= kept <= 1:
                raise ValueError(f"{name}={kept:g}: a share is between 0 and 1")
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} cannot be taken")
        bits, channels = at_layer(self.bits, layer), dims.head_dim
        group = resolve_group(self.group_size, channels, "head_dim", GROUP)
        format = GroupFormat(bits, "asym", "channels", group, channels, block, self.scale_dtype)
        keys, values = (Rounding(bits, group, kept) for kept in (self.k_kept, self.v_kept))
        kept = self.k_kept if side == "k" else self.v_kept
        return OutputAwareCodec(
            side, format, kept=kept, keys=keys, values=values, base=self.base, steps=self.steps
        )
