"""AWQ's gemm layout: 4-bit codes [in, out] packed along the outputs, in the order 0 2 4 6 1 3 5 7
of the columns of each 32-bit word.

weight = (codes - zero) * scale, with zeros and scales per group of inputs and output.
"""

from __future__ import annotations

import dataclasses

from kvq_models.llama.quantized.groups import GroupedCodes, unpacked
from kvq_models.llama.quantized.stored_parts import FLOATS, GroupedLayout, StoredParts

_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Awq(GroupedLayout):
    """Groups of `group_size` inputs, -1 for all."""

    group_size: int

    @property
    def ends(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales")

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        inputs, words = parts.shape("qweight", ("I32",), rank=2)
        groups = parts.groups(inputs, self.group_size)
        parts.check("qzeros", ("I32",), (groups, words))
        parts.check("scales", FLOATS, (groups, 8 * words))
        return 8 * words, inputs

    def packs(self, parts: StoredParts) -> bool:
        return self.has_whole_groups(parts, "scales", axis=0)

    def grouped(self, parts: StoredParts) -> GroupedCodes:
        codes, zeros = (
            unpacked(parts.read(end), 4, 1, _COLUMNS).T for end in ("qweight", "qzeros")
        )
        return GroupedCodes(codes, parts.read("scales").T, zeros, 4)
