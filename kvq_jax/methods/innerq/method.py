"""InnerQ's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from kvq_jax.arrays.grouped_array import GroupFormat, Scheme, resolve_group
from kvq_jax.arrays.slot_array import SLOT_BITS
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.innerq.codec import InnerQCodec, SlotCodec
from kvq_jax.types.array_types import ModelDims

BITS = (1, 2, 3, 4, 8)
Mode = Literal["sym", "asym", "hybrid", "hybrid_prefill"]
Storage = Literal["planes", "slot"]


@dataclasses.dataclass(frozen=True)
class InnerQ(Method):
    """Keys per token over groups of channels, values per channel over groups of tokens. Source:
    Tayaranian et al., InnerQ, section 4."""

    name: ClassVar[str] = "innerq"
    summary: ClassVar[str] = (
        "inner-dimension groups, symmetric or asymmetric by group (hybrid), keys normalized per"
        " channel"
    )
    source: ClassVar[str] = "InnerQ (Tayaranian et al. 2026), arXiv:2602.23200"
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {"total_bits": ("bits",)}

    bits: int | PerLayer = option(
        2,
        "magnitude bits, the paper's count: the sign of symmetric groups is extra",
        choices=BITS,
        per_layer=True,
    )
    total_bits: int = option(
        0,
        "bits, the sign included (0: use bits); 3 here is the paper's 2 unless mode=asym",
        choices=(0, 2, 3, 4, 5, 8, 9),
    )
    mode: Mode = option(
        "hybrid", "how a group is quantized", choices=("hybrid", "sym", "asym", "hybrid_prefill")
    )
    group_size: int = option(0, "elements that share a scale (0: 32, or the largest divisor below)")
    normalize: bool = option(True, "divide keys by a norm of each channel of the prompt")
    scale_dtype: str = scale_dtype_option()
    storage: Storage = option(
        "planes",
        "of hybrid groups. planes: a bit plane of signs, and a zero point. slot: the paper's word"
        " of signs or an fp32 zero point, smaller, but no kernel reads it",
        choices=("planes", "slot"),
    )

    def windows(self) -> Windows:
        return Windows(sink=32, recent=96, block=self.group_size or 32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        bits = at_layer(self.bits, layer)
        if self.total_bits:
            bits = self.total_bits - (self.mode != "asym")
        scheme: Scheme = "hybrid" if self.mode == "hybrid_prefill" else self.mode
        if side == "k":
            group, axis = resolve_group(self.group_size, dims.head_dim, "head_dim"), "channels"
        else:
            group, axis = resolve_group(self.group_size, block, "the block of tokens"), "tokens"
        format = GroupFormat(bits, scheme, axis, group, dims.head_dim, block, self.scale_dtype)
        if self.storage == "slot":
            self._check_slot(group)
        codec = SlotCodec if self.storage == "slot" else InnerQCodec
        return codec(
            side,
            format,
            hybrid_decode=self.mode != "hybrid_prefill",
            normalize=self.normalize and side == "k",
        )

    def _check_slot(self, group: int) -> None:
        if self.mode in ("sym", "asym"):
            raise ValueError(
                "storage=slot is for hybrid groups, whose signs and zero points share a word, not"
                f" for mode={self.mode}"
            )
        if group > SLOT_BITS:
            raise ValueError(
                f"storage=slot has {SLOT_BITS} bits for the signs of a group, and"
                f" group_size={group} is larger"
            )
