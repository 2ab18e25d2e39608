"""Block-GTQ's options. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from kvq_jax.arrays.reverse_water_filling import MAX_BITS, allocate, layer_widths
from kvq_jax.arrays.run_array import RunFormat
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import (
    Method,
    PerLayer,
    Windows,
    at_layer,
    option,
    per_layer,
    scale_dtype_option,
)
from kvq_jax.methods.block_gtq.codec import RateGroupsCodec
from kvq_jax.methods.waterfill.widths import (
    TEMPLATE_FALL,
    Parameters,
    Widths,
    chunk_energies,
    read,
    widths_by_layer,
    written,
)
from kvq_jax.types.array_types import ModelDims

ERRORS = tuple(4.0**-bits for bits in range(MAX_BITS + 1))  # the paper's law of TurboQuant's error
MIN_BITS = 1  # bits of a pair, as in the public code
CHUNK = 4  # channels, two pairs: the levels of a group need three
WIDE_CHUNK = 8  # channels, from head dim 256 on: 32 digits, which also describe head dim 128
V_BITS = tuple(range(MAX_BITS + 1))


@dataclasses.dataclass(frozen=True)
class BlockGTQ(Method):
    """Keys with more bits for RoPE pairs in which queries and keys are large. Values as TurboQuant
    has them.

    Source: Liang, Zhang and Jia, RoPE-Aware Bit Allocation for KV-Cache Quantization, Algorithm 1
    and its public code.
    """

    name: ClassVar[str] = "block_gtq"
    summary: ClassVar[str] = (
        "bits shared out over RoPE pairs by the energy of queries and keys, groups of one width as"
        " turboquant (needs kvq calibrate)"
    )
    source: ClassVar[str] = "Block-GTQ (Liang et al. 2026), arXiv:2606.24033"
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # it always does

    bits: float = option(3.0, "mean bits of a key's codes, without norms")
    v_bits: int | PerLayer = option(
        0, "bits of a value's codes (0: bits, rounded down)", choices=V_BITS, per_layer=True
    )
    k_widths: int | PerLayer = option(
        0,
        "bits of a head's sorted key channels, a digit for each 4 (8 from head dim 256 on), such as"
        " 8643222211111111 (0: by bits)",
        per_layer=True,
    )
    scale_dtype: str = scale_dtype_option("norms")

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=32)

    def fitted(
        self, calibrated: Mapping[Side, Sequence[Mapping[str, np.ndarray]]], dims: ModelDims
    ) -> Method:
        """Return the method with widths of keys for each layer, by its energies."""
        if self.k_widths or "k" not in calibrated:
            return self

        def share(
            head_dim: int, layers: list[Sequence[Parameters]], profiles: int
        ) -> list[list[Widths]]:
            count = self._chunks(head_dim)
            energies = [[chunk_energies(keys["energies"], count)] for [keys] in layers]
            return layer_widths(energies, [self._budget(count)], profiles, ERRORS, MIN_BITS)

        filled = widths_by_layer([[keys] for keys in calibrated["k"]], dims, share)
        if not filled:
            return self
        return dataclasses.replace(self, k_widths=per_layer([written(keys) for [keys] in filled]))

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        if side == "k":
            widths = self._widths(layer, dims.head_dim)
        else:
            widths = (at_layer(self.v_bits, layer) or self._budget(1),)
        format = RunFormat(dims.head_dim, block, widths)
        return RateGroupsCodec(side, format, self.scale_dtype, ordered=side == "k")

    def _widths(self, layer: int, head_dim: int) -> tuple[int, ...]:
        count = self._chunks(head_dim)
        if not (number := at_layer(self.k_widths, layer)):
            energies = 4.0 ** (-TEMPLATE_FALL * (np.arange(count) + 0.5) / count)
            return tuple(map(int, allocate(energies, self._budget(count), ERRORS, MIN_BITS)))
        widths = read("k_widths", number, head_dim)
        if widths[-1] < MIN_BITS or head_dim < CHUNK * len(widths):
            raise ValueError(
                f"k_widths={number}: a digit stands for {CHUNK} channels or more, and each has at"
                f" least {MIN_BITS} bit"
            )
        return widths

    def _budget(self, count: int) -> int:
        """Return the bits of all chunks together."""
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(f"bits={self.bits:g}: between {MIN_BITS} and {MAX_BITS} can be stored")
        return math.floor(count * self.bits + 1e-6)

    @staticmethod
    def _chunks(head_dim: int) -> int:
        chunk = WIDE_CHUNK if head_dim >= 256 else CHUNK
        if head_dim % chunk:
            raise ValueError(f"head_dim {head_dim} is not a multiple of {chunk}")
        return head_dim // chunk
