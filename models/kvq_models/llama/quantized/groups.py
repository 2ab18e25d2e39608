"""Codes packed into 32-bit words, and scales that groups of inputs share."""

from __future__ import annotations

import numpy as np


def unpacked(
    words: np.ndarray, bits: int, axis: int, columns: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return the codes in 32-bit words, uint8, lowest bits first.

    Args:
        words: [rows, columns], 32-bit.
        bits: of a code, a divisor of 8.
        axis: the axis that is packed, which grows by 32 / bits.
        columns: where each code of a word belongs among the word's codes, if not in order.
    """
    count, words = 32 // bits, words.view(np.uint32)
    shape = list(words.shape)
    shape.insert(axis + 1, count)
    codes = np.empty(shape, np.uint8)
    for i, column in enumerate(columns or range(count)):
        target = codes[:, :, column] if axis == 1 else codes[:, column]
        np.copyto(target, (words >> np.uint32(bits * i)) & (2**bits - 1), casting="unsafe")
    shape = list(words.shape)
    shape[axis] *= count
    return codes.reshape(shape)


def scaled_groups(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray | None = None
) -> np.ndarray:
    """Return (codes - zeros) * scales in float32, with one zero and scale per group and output.

    Args:
        codes: [in, out].
        zeros: [groups, out], whole numbers.
        scales: [groups, out], float32.
        index: [in], the group of each input. None if groups are equal runs of inputs.
    """
    values, size = codes.astype(np.float32), len(codes) // len(scales)
    for group, (zero, scale) in enumerate(zip(zeros.astype(np.float32), scales, strict=True)):
        if index is None:
            part = values[group * size : (group + 1) * size]
            part -= zero
            part *= scale
        else:
            inputs = np.flatnonzero(index == group)
            values[inputs] = (values[inputs] - zero) * scale
    return values
