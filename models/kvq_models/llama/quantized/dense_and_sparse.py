"""Dense-and-sparse weights of 4 bits, as `kvq quantize-weights --packed` writes them: 16 levels for
each output, and sparse entries that stay as they are.

weight = sparse value of (output, input), or level[output][code], the first code of a byte in its
lower half. The code of a sparse entry is 0.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32, UInt8, UInt16

from kvq_models.llama.quantized.stored_parts import FLOATS, Layout, StoredParts
from kvq_models.llama.stored_tensor import CheckpointError

METHOD = "dense_and_sparse"  # quant_method of quantization_config
CONFIG = {"quant_method": METHOD, "bits": 4}
LEVELS, WORD = 16, 8  # levels of an output; inputs of a packed word
MAX_INPUTS = 1 << 16  # that 16 bits can tell apart


class TabledRows(NamedTuple):
    """The tensors of a weight [out, in], in the order and under the ends of their names."""

    codes: UInt8[np.ndarray, "out bytes"]
    levels: Float[np.ndarray, "out 16"]
    sparse_starts: Int32[np.ndarray, "starts"]
    sparse_inputs: UInt16[np.ndarray, "n"]
    sparse_values: Float[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class DenseAndSparse(Layout):
    """`codes` [out, in / 2] and `levels` [out, 16]; of output o the entries from `sparse_starts` o
    to o + 1, whose `sparse_inputs` rise, with `sparse_values` in the type of the levels."""

    @property
    def ends(self) -> tuple[str, ...]:
        return TabledRows._fields

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        outputs, half = parts.shape("codes", ("U8",), rank=2)
        if 2 * half > MAX_INPUTS:
            raise CheckpointError(
                f"tensor {parts.module + '.codes'!r} has {2 * half} inputs, and sparse entries"
                f" number {MAX_INPUTS} at most"
            )
        parts.check("levels", FLOATS, (outputs, LEVELS))
        parts.check("sparse_starts", ("I32",), (outputs + 1,))
        entries = parts.shape("sparse_inputs", ("U16",), rank=1)
        parts.check("sparse_values", (parts.headers["levels"].dtype,), entries)
        return outputs, 2 * half

    def dequantized(self, parts: StoredParts) -> np.ndarray:
        rows = self.tabled(parts)
        codes = np.stack([rows.codes & 15, rows.codes >> np.uint8(4)], axis=2)
        codes = codes.reshape(len(codes), -1)
        values = np.empty(codes.shape, np.float32)
        for row, levels, of_row in zip(values, rows.levels.astype(np.float32), codes, strict=True):
            np.take(levels, of_row, out=row)
        values[_outputs(rows), rows.sparse_inputs] = rows.sparse_values.astype(np.float32)
        return values

    def packs(self, parts: StoredParts) -> bool:
        return self.shape(parts)[1] % WORD == 0

    def tabled(self, parts: StoredParts) -> TabledRows:
        """Return the tensors. Raise CheckpointError if the sparse entries are not in order, beyond
        the inputs, or have codes."""
        rows = TabledRows(*(parts.read(end) for end in self.ends))
        if wrong := _wrong(rows):
            raise CheckpointError(f"tensor {f'{parts.module}.{wrong[0]}'!r} {wrong[1]}")
        return rows


def is_finite(rows: TabledRows) -> bool:
    """Return True if all levels and sparse values are finite."""
    return all(bool(np.isfinite(a.astype(np.float32)).all()) for a in (rows[1], rows[4]))


def _outputs(rows: TabledRows) -> np.ndarray:
    return np.repeat(np.arange(len(rows.codes)), np.diff(rows.sparse_starts))


def _wrong(rows: TabledRows) -> tuple[str, str] | None:
    """Return the tensor that is wrong, and what it should be."""
    starts, inputs = rows.sparse_starts, rows.sparse_inputs.astype(np.int64)
    if starts[0] != 0 or starts[-1] != len(inputs) or np.any(np.diff(starts) < 0):
        return "sparse_starts", f"does not rise from 0 to its {len(inputs)} entries"
    if np.any(inputs >= 2 * rows.codes.shape[1]):
        return "sparse_inputs", f"holds inputs beyond {2 * rows.codes.shape[1] - 1}"
    outputs = _outputs(rows)
    if np.any(np.diff(inputs)[np.diff(outputs) == 0] <= 0):
        return "sparse_inputs", "does not rise within an output"
    codes = rows.codes[outputs, inputs // 2] >> (4 * (inputs % 2)).astype(np.uint8)
    if np.any(codes & 15):
        return "codes", "has codes other than 0 in place of sparse entries"
    return None
