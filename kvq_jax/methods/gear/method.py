"""GEAR's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from kvq_jax.arrays.channel_groups import channel_group
from kvq_jax.arrays.grouped_array import GroupFormat, resolve_group
from kvq_jax.arrays.sparse_outliers import MAX_PLACES, MAX_POOL, MAX_SLOTS, Pool
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option, scale_dtype_option
from kvq_jax.methods.gear.codec import GearCodec
from kvq_jax.types.array_types import ModelDims

BITS = (2, 3, 4, 8)
# tokens of a block, and elements of a group: the public code's streaming gap and group size
GROUP = 64


@dataclasses.dataclass(frozen=True)
class Gear(Method):
    """Uniform codes, a low-rank approximation of their error in each block, and outliers in full
    precision.

    Source: Kang et al., GEAR, section 3.
    """

    name: ClassVar[str] = "gear"
    summary: ClassVar[str] = (
        "uniform codes, a low-rank approximation of their error, and outliers (outliers=0: GEAR-L)"
    )
    source: ClassVar[str] = "GEAR (Kang et al. 2024), arXiv:2403.05527"
    presets: ClassVar[Mapping[str, str]] = {
        "gear-l": "outliers=0",
        "kcvt": "backbone=kcvt,bits=4,block=20,sink=0,recent=0",
    }

    bits: int | PerLayer = option(2, "bits of keys and values", choices=BITS, per_layer=True)
    group_size: int = option(0, "elements that share a scale (0: 64, or the largest divisor below)")
    backbone: Literal["kivi", "kcvt"] = option(
        "kivi",
        "groups: kivi's, or kcvt's, one for each channel of a block and one for each token",
        choices=("kivi", "kcvt"),
    )
    rank: int = option(2, "rank of the approximation in each block and head (0: none)")
    turns: int = option(3, "power iterations that find it")
    outliers: float = option(
        0.02, "fraction of entries in full precision, half of them on each side; 0 is GEAR-L"
    )
    pre_rope: bool = option(False, "cache keys before RoPE")
    scale_dtype: str = scale_dtype_option()

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=self.group_size or GROUP)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        self._check(dims, block)
        heads, channels = dims.num_key_value_heads, dims.head_dim
        per_side, pool = self._outliers(side, heads, channels, block)
        bits = at_layer(self.bits, layer)
        format = self._format(side, bits, heads, channels, block)
        return GearCodec(
            side, format, self.rank, self.turns, per_side, pool, self.pre_rope and side == "k"
        )

    def _format(self, side: Side, bits: int, heads: int, channels: int, block: int) -> GroupFormat:
        if side == "k":
            group = block
            if self.backbone != "kcvt":
                group = resolve_group(self.group_size, block, "the block of tokens", GROUP)
            return GroupFormat(bits, "asym", "tokens", group, channels, block, self.scale_dtype)
        if self.backbone == "kcvt":
            token = channel_group(0, heads, channels)
            return GroupFormat(
                bits,
                "asym",
                "channels",
                token.channels,
                channels,
                block,
                self.scale_dtype,
                token.heads,
            )
        group = resolve_group(self.group_size, channels, "head_dim", GROUP)
        return GroupFormat(bits, "asym", "channels", group, channels, block, self.scale_dtype)

    def _outliers(
        self, side: Side, heads: int, channels: int, block: int
    ) -> tuple[int, Pool | None]:
        """Return the number of outliers on each side of a channel's run or a token, at least one,
        and their slots. A run is the largest part of a block that 16 bits can count."""
        if not self.outliers:
            return 0, None

        def sizes(run: int) -> tuple[int, int, int]:
            """Return the entries that outliers are chosen from, those on each side, and slots."""
            width = heads * channels
            together, times = (run, width) if side == "k" else (width, run)
            per_side = max(1, math.floor(together * self.outliers / 2))
            return together, per_side, 2 * per_side * times

        parts = (n for n in range(1, MAX_POOL + 1) if block % n == 0)
        runs = [n for n in parts if n * channels <= MAX_PLACES and sizes(n)[2] <= MAX_SLOTS]
        if not runs:
            raise ValueError(
                f"outliers={self.outliers:g} of {heads} heads of {channels} channels do not fit"
                " 16-bit counts: take a smaller fraction"
            )
        run = runs[-1]
        together, per_side, slots = sizes(run)
        if 2 * per_side >= together:
            raise ValueError(
                f"outliers={self.outliers:g} leaves nothing of {together} entries: a smaller"
                " fraction, or a larger block"
            )
        return per_side, Pool(run, slots, overflows=False)

    def _check(self, dims: ModelDims, block: int) -> None:
        if self.backbone == "kcvt" and self.group_size:
            raise ValueError(
                f"group_size={self.group_size} has no meaning with backbone=kcvt: a group is a"
                " channel of a block, or a token"
            )
        if not 0 <= self.outliers < 0.5:
            raise ValueError(f"outliers={self.outliers:g} must be 0, or a fraction below 0.5")
        if self.rank > min(block, dims.head_dim):
            raise ValueError(
                f"rank={self.rank} must not be above the block ({block}) or head_dim"
                f" ({dims.head_dim})"
            )
        if not self.turns:
            raise ValueError("turns=0 finds no approximation: take at least 1")
