"""compressed-tensors' pack-quantized: signed integers, stored with an offset of half their range,
packed along the inputs into 32-bit words.

weight = (codes - zero) * scale, with a scale per output and group of inputs. `weight_g_idx` names
the group of each input if columns were quantized in another order.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvq_models.llama.quantized.groups import GroupedCodes, unpacked
from kvq_models.llama.quantized.stored_parts import FLOATS, GroupedLayout, StoredParts
from kvq_models.llama.stored_tensor import CheckpointError


@dataclasses.dataclass(frozen=True)
class PackedInt(GroupedLayout):
    """Codes of `bits` in groups of `group_size` inputs, -1 for all."""

    bits: int
    group_size: int
    symmetric: bool

    @property
    def ends(self) -> tuple[str, ...]:
        scales = ("weight_scale", "weight_zero_point", "weight_g_idx")
        return "weight_packed", *scales, "weight_shape"

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        outputs, words = parts.shape("weight_packed", ("I32",), rank=2)
        parts.check("weight_shape", ("I64", "I32"), (2,))
        if self.group_size == -1:
            inputs = int(parts.read("weight_shape")[1])
        else:  # without reading a file per weight
            inputs = parts.shape("weight_scale", FLOATS, rank=2)[1] * self.group_size
        if words != -(-inputs * self.bits // 32):
            raise CheckpointError(
                f"tensor {parts.module + '.weight_packed'!r} has shape {(outputs, words)}, and"
                f" {inputs} inputs of {self.bits} bits ask for {-(-inputs * self.bits // 32)} words"
            )
        groups = parts.groups(inputs, self.group_size)
        parts.check("weight_scale", FLOATS, (outputs, groups))
        if not self.symmetric or "weight_zero_point" in parts:
            self._check_zeros(parts, outputs, groups)
        if "weight_g_idx" in parts:
            parts.check("weight_g_idx", ("I32", "I64"), (inputs,))
        return outputs, inputs

    def _check_zeros(self, parts: StoredParts, outputs: int, groups: int) -> None:
        if parts.shape("weight_zero_point", ("I32", "I8")) != (outputs, groups):
            words = -(-outputs * self.bits // 32)
            parts.check("weight_zero_point", ("I32",), (words, groups))
        else:  # older files do not pack them
            parts.shape("weight_zero_point", ("I8",))

    def packs(self, parts: StoredParts) -> bool:
        return (
            (self.bits == 4 or "weight_zero_point" not in parts)
            and self.has_whole_groups(parts, "weight_scale", axis=1)
            and self._index(parts) is None
        )

    def grouped(self, parts: StoredParts) -> GroupedCodes:
        scales = parts.read("weight_scale")
        shape = self.shape(parts)
        if (stated := tuple(map(int, parts.read("weight_shape")))) != shape:
            raise CheckpointError(
                f"tensor {parts.module + '.weight_shape'!r} says {stated}, and its codes and scales"
                f" have shape {shape}"
            )
        codes = unpacked(parts.read("weight_packed"), self.bits, axis=1)[:, : shape[1]]
        zeros = self._zeros(parts, scales.shape)
        return GroupedCodes(codes, scales, zeros, self.bits, self._index(parts))

    @staticmethod
    def _index(parts: StoredParts) -> np.ndarray | None:
        """Return the group of each input, or None for groups in order, for which -1 everywhere
        stands, too."""
        if "weight_g_idx" not in parts or (parts.read("weight_g_idx") == -1).all():
            return None
        return parts.group_index("weight_g_idx", parts.headers["weight_scale"].shape[1])

    def _zeros(self, parts: StoredParts, shape: tuple[int, ...]) -> np.ndarray:
        """Return the zero points with the offset of the codes, [out, groups]."""
        half = 2 ** (self.bits - 1)
        if "weight_zero_point" not in parts:
            return np.full(shape, half)
        zeros = parts.read("weight_zero_point")
        if zeros.dtype == np.int8:
            return zeros.astype(np.int32) + half
        return unpacked(zeros, self.bits, axis=0)[: shape[0]]
