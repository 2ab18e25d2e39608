"""MXFP4, as gpt-oss publishes its experts: 4-bit floats (e2m1) with a power of two for each 32
inputs. All experts of a projection are one tensor.

weight = value[code] * 2^(scale - 127), the first code of a byte in its lower half. Source: OCP
Microscaling Formats (MX), version 1.0, sections 5.3 and 6.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvq_models.llama.quantized.stored_parts import Layout, StoredParts
from kvq_models.llama.stored_tensor import CheckpointError

_BYTES, _BIAS = 16, 127  # bytes of a block, and the bias of its exponent
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4(Layout):
    """`blocks` [experts, out, in / 32, 16] and `scales` [experts, out, in / 32], both bytes. The
    weight is [experts, in, out]."""

    @property
    def ends(self) -> tuple[str, ...]:
        return ("blocks", "scales")

    def name(self, module: str) -> str:
        return module

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        experts, outputs, groups, size = parts.shape("blocks", ("U8",), rank=4)
        if size != _BYTES:
            raise CheckpointError(
                f"tensor {parts.module + '.blocks'!r} has blocks of {size} bytes, and MXFP4 has"
                f" {_BYTES}"
            )
        parts.check("scales", ("U8",), (experts, outputs, groups))
        return experts, groups * 2 * _BYTES, outputs

    def dequantized(self, parts: StoredParts) -> np.ndarray:
        blocks, scales = parts.read("blocks"), parts.read("scales")
        pairs = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)  # of each byte
        weights = np.empty((*scales.shape[:2], scales.shape[2] * 2 * _BYTES), np.float32)
        for i, (codes, exponents) in enumerate(zip(blocks, scales, strict=True)):
            values = pairs[codes].reshape(*exponents.shape, 2 * _BYTES)
            powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
            weights[i] = (values * powers[..., None]).reshape(weights.shape[1:])
        return weights.swapaxes(1, 2)

    def blocks(self, parts: StoredParts) -> np.ndarray:
        """Return the weight [experts, out, in / 32, 17] in GGUF's blocks, without dequantizing: the
        scale, and bytes that hold inputs i and i + 16 instead of 2 i and 2 i + 1."""
        codes, scales = parts.read("blocks"), parts.read("scales")
        first, second, half = codes[..., : _BYTES // 2], codes[..., _BYTES // 2 :], np.uint8(4)
        blocks = np.empty((*scales.shape, 1 + _BYTES), np.uint8)
        blocks[..., 0] = scales
        blocks[..., 1::2] = (first & 15) | (second << half)
        blocks[..., 2::2] = (first >> half) | (second & 0xF0)
        return blocks
