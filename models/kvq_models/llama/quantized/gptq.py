"""GPTQ: codes [in, out] packed along the inputs into 32-bit words, zeros along the outputs.

weight = (codes - zero) * scale. `g_idx` names the group of each input (act-order). The first
checkpoint format stores zeros less one, `gptq_v2` as they are.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvq_models.llama.quantized.groups import GroupedCodes, unpacked
from kvq_models.llama.quantized.stored_parts import FLOATS, GroupedLayout, StoredParts
from kvq_models.llama.stored_tensor import CheckpointError


@dataclasses.dataclass(frozen=True)
class Gptq(GroupedLayout):
    """Codes of `bits` in groups of `group_size` inputs, -1 for all."""

    bits: int
    group_size: int
    act_order: bool
    zeros_less_one: bool

    @property
    def ends(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", "g_idx")

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        count = 32 // self.bits
        words, outputs = parts.shape("qweight", ("I32",), rank=2)
        if outputs % count:
            raise CheckpointError(
                f"tensor {parts.module + '.qweight'!r} has {outputs} outputs, and zeros of"
                f" {self.bits} bits are packed by {count}"
            )
        inputs = words * count
        groups = parts.groups(inputs, self.group_size)
        parts.check("qzeros", ("I32",), (groups, outputs // count))
        parts.check("scales", FLOATS, (groups, outputs))
        if self.act_order or "g_idx" in parts:
            parts.check("g_idx", ("I32", "I64"), (inputs,))
        return outputs, inputs

    def packs(self, parts: StoredParts) -> bool:
        return (
            self.bits == 4
            and self.has_whole_groups(parts, "scales", axis=0)
            and ("g_idx" not in parts or self._index(parts) is None)
        )

    def grouped(self, parts: StoredParts) -> GroupedCodes:
        zeros = parts.read("qzeros").view(np.uint32)
        if self.zeros_less_one:
            # on whole words, as they were written: a zero of 0 borrowed from its neighbour
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            zeros = zeros + np.uint32(ones)
        codes = unpacked(parts.read("qweight"), self.bits, axis=0).T
        zeros = unpacked(zeros, self.bits, axis=1).T
        return GroupedCodes(codes, parts.read("scales").T, zeros, self.bits, self._index(parts))

    def _index(self, parts: StoredParts) -> np.ndarray | None:
        """Return the group of each input, or None if groups are equal runs of inputs."""
        if "g_idx" not in parts:
            return None
        groups = parts.headers["scales"].shape[0]
        index = parts.group_index("g_idx", groups)
        in_order = np.repeat(np.arange(groups), len(index) // groups)
        return None if np.array_equal(index, in_order) else index
