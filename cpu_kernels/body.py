"""The description of the keys, or the values, of a cache's body, as the kernels take it (csrc/body.h)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

Affine = Literal["token groups", "channel groups", "channels"]
_AFFINE = ("token groups", "channel groups", "channels")
_SCALE_DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Body:
    """vector[t, c] = entry(code[t, c]) * scale + zero, the entry being the code itself or that of a table. Static and hashable.

    bits, low_bits: of a code, and those of its first plane set. channels: H. chunks, width, slots, span: of the plane layout (c, W, n, P).
    affine: what has a scale and a zero point of its own; stored are [S / group, H] for "token groups", [H / group, S] for "channel groups",
    [H] for "channels". heads: neighbouring heads that share them. scale_dtype: theirs; 16-bit floats come as uint16 that holds their bits.
    centre: the code that stands for 0 where no zero point is stored, else None. table: codes index a table of 2^bits entries, fp32.
    """

    bits: int
    low_bits: int
    channels: int
    chunks: int
    width: int
    slots: int
    span: int
    affine: Affine
    group: int
    heads: int = 1
    scale_dtype: str = "float16"
    centre: int | None = None
    table: bool = False

    def fields(self) -> np.ndarray:
        """Return the fields as the kernels read them, int64."""
        numbers = dataclasses.asdict(self) | {
            "affine": _AFFINE.index(self.affine),
            "scale_dtype": _SCALE_DTYPES.index(self.scale_dtype),
            "centre": -1 if self.centre is None else self.centre,
        }
        return np.array(list(numbers.values()), np.int64)
