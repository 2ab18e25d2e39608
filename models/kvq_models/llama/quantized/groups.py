"""Codes packed into 32-bit words, and scales that groups of inputs share."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int, Integer, Shaped


@dataclasses.dataclass(frozen=True)
class GroupedCodes:
    """A weight [out, in] as w[o, i] = (code[o, i] - zero[o, group of i]) scale[o, group of i], or
    levels[code[o, i]] scale[o, group of i].

    codes: int8, or uint8 counted from 0, or numbers of FP8. scales: as stored. zeros: whole
    numbers. bits: of a code. index: the group of each input, or None if groups are equal runs of
    inputs. levels: None for integers.
    """

    codes: Shaped[np.ndarray, "out in"]
    scales: Float[np.ndarray, "out groups"]
    zeros: Integer[np.ndarray, "out groups"]
    bits: int
    index: Int[np.ndarray, "in"] | None = None
    levels: tuple[float, ...] | None = None

    def dequantized(self) -> Float[np.ndarray, "out in"]:
        """Return the weight in float32."""
        codes, groups = self.codes.T, self.scales.shape[1]
        table = None if self.levels is None else np.array(self.levels, np.float32)
        values = codes.astype(np.float32) if table is None else table[codes]
        size = len(values) // groups
        zeros, scales = (a.T.astype(np.float32) for a in (self.zeros, self.scales))
        for group, (zero, scale) in enumerate(zip(zeros, scales, strict=True)):
            if self.index is None:
                part = values[group * size : (group + 1) * size]
                part -= zero
                part *= scale
            else:
                inputs = np.flatnonzero(self.index == group)
                values[inputs] = (values[inputs] - zero) * scale
        return values.T


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
