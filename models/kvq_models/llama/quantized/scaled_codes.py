"""Weights of one number per element, 8-bit floats or integers, with a scale for each block of them:
weight = (codes - zero) * scale.

DeepSeek and Qwen publish FP8 in blocks of 128 x 128 (`weight_scale_inv`, which is multiplied in
spite of its name), AutoFP8 and Mistral with one scale per tensor, FBGEMM with one per output, and
compressed-tensors FP8 and int8 with all of these.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from kvq_models.llama.quantized.groups import GroupedCodes
from kvq_models.llama.quantized.stored_parts import FLOATS, GROUP, Layout, StoredParts

# outputs and inputs that share a scale; None for all of them
Block = tuple[int | None, int | None]
PER_TENSOR: Block = (None, None)
PER_OUTPUT: Block = (1, None)
_SCALES = ("weight_scale_inv", "weight_scale")


@dataclasses.dataclass(frozen=True)
class ScaledCodes(Layout):
    """`codes` is the type of the codes in the file. `blocks` are the blocks that a scale may stand
    for: the shape of the scales decides."""

    codes: str
    blocks: tuple[Block, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        return "weight", *_SCALES, "weight_zero_point"

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        shape = parts.shape("weight", (self.codes,), rank=2)
        scale = self._scale(parts)
        fitting = [stored for block in self.blocks for stored in _shapes(shape, block)]
        parts.check(scale, (*FLOATS, "F8_E8M0"), *fitting)
        if "weight_zero_point" in parts:
            parts.check("weight_zero_point", (self.codes,), parts.headers[scale].shape)
        return shape

    def dequantized(self, parts: StoredParts) -> np.ndarray:
        values, scale = parts.floats("weight"), parts.floats(self._scale(parts))
        block, grid = self._block(parts), _grid(values.shape, self._block(parts))
        if "weight_zero_point" in parts:
            _apply(np.subtract, values, parts.floats("weight_zero_point").reshape(grid), block)
        _apply(np.multiply, values, scale.reshape(grid), block)
        return values

    def packs(self, parts: StoredParts) -> bool:
        width = self._block(parts)[1]
        whole = width is None or (self.shape(parts)[1] % width == 0 and width % GROUP == 0)
        return whole and "weight_zero_point" not in parts

    def grouped(self, parts: StoredParts) -> GroupedCodes:
        codes, block = parts.read("weight"), self._block(parts)
        scales = parts.read(self._scale(parts)).reshape(_grid(codes.shape, block))
        if scales.dtype == ml_dtypes.float8_e8m0fnu:
            scales = scales.astype(np.float32)
        by_output = np.repeat(scales, block[0] or len(codes), axis=0)[: len(codes)]
        return GroupedCodes(codes, by_output, np.zeros_like(by_output, np.int8), 8)

    def _block(self, parts: StoredParts) -> Block:
        shapes = (parts.headers[end].shape for end in ("weight", self._scale(parts)))
        weight, scale = shapes
        return next(block for block in self.blocks if scale in _shapes(weight, block))

    @staticmethod
    def _scale(parts: StoredParts) -> str:
        return next((end for end in _SCALES if end in parts), _SCALES[-1])


def _grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the number of blocks along each axis. The last block may be cut off."""
    return tuple(1 if of is None else -(-size // of) for size, of in zip(shape, block, strict=True))


def _shapes(shape: tuple[int, ...], block: Block) -> list[tuple[int, ...]]:
    """Return the shapes in which the scales of such blocks are stored."""
    grid = _grid(shape, block)
    without_inputs = [grid[:1]] if block[1] is None else []
    return [grid, *without_inputs, *([()] if block == PER_TENSOR else [])]


def _apply(operation: np.ufunc, values: np.ndarray, grid: np.ndarray, block: Block) -> None:
    """Apply an operation in place with the number of each block. No temporary array is as large as
    the values."""
    outputs, inputs = values.shape
    height, width = block[0] or outputs, block[1] or inputs
    numbers = np.repeat(grid, height, axis=0)[:outputs]  # [out, blocks]
    whole = inputs // width
    head = values[:, : whole * width].reshape(outputs, whole, width)  # a view
    operation(head, numbers[:, :whole, None], out=head)
    if inputs % width:
        tail = values[:, whole * width :]
        operation(tail, numbers[:, whole:], out=tail)
