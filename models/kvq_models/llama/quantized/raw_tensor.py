"""Tensors of types that numpy does not have, which safetensors does not return as numpy arrays."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

RAW_DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


def read_raw(file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of one of `RAW_DTYPES` from a safetensors file whose header is checked."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        start, _ = json.loads(opened.read(length))[name]["data_offsets"]
        opened.seek(8 + length + start)
        data = np.fromfile(opened, np.uint8, math.prod(shape))
    return data.view(RAW_DTYPES[dtype]).reshape(shape)
