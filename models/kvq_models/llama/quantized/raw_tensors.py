"""The parts of quantized weights, read by their place in a safetensors file.

The library's reader has no numpy arrays of 8-bit floats, and parses the header at each opening: a
mixture of experts has tens of thousands of parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor, first_line

_DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.float16,
    "F32": np.float32,
    "I8": np.int8,
    "U8": np.uint8,
    "U16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
}


class RawTensors:
    """Read tensors of files whose headers safetensors has checked. Each header is parsed once.

    on_read: takes each tensor that was read, with the file's header.
    """

    def __init__(
        self, on_read: Callable[[StoredTensor, np.ndarray, dict[str, Any]], None] | None = None
    ) -> None:
        self._on_read = on_read
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def __call__(self, stored: StoredTensor) -> np.ndarray:
        """Return a tensor as it is stored. Raise CheckpointError if the file cannot be read."""
        count = math.prod(stored.shape)
        try:
            with stored.file.open("rb") as file:
                if stored.file not in self._headers:
                    length = int.from_bytes(file.read(8), "little")
                    self._headers[stored.file] = (8 + length, json.loads(file.read(length)))
                start, header = self._headers[stored.file]
                file.seek(start + header[stored.stored_as or ""]["data_offsets"][0])
                tensor = np.fromfile(file, _DTYPES[stored.dtype], count).reshape(stored.shape)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{str(stored.file)!r} changed while it was read: {first_line(error)}"
            ) from error
        if self._on_read is not None:
            self._on_read(stored, tensor, header)
        return tensor
