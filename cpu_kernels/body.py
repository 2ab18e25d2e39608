"""The description of the keys, or the values, of a cache's body for the kernels (csrc/body.h)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

Affine = Literal["token groups", "channel groups", "channels"]
Form = Literal["codes", "rows", "polar", "runs", "floats"]
_AFFINE = ("token groups", "channel groups", "channels")
_FORMS = ("codes", "rows", "polar", "runs", "floats")
MAX_CHANNELS = 1024  # of a head (kMaxChannels of csrc/body.h)
RUN_WIDTHS = 8
_DTYPES = ("float16", "bfloat16", "float32", "e8m0", "e4m3")


@dataclasses.dataclass(frozen=True)
class Body:
    """vector[t, c] = entry(code[t, c]) * scale + zero, with the code itself, or its entry in a
    table. Static and hashable.

    form: "codes" are as above; "rows" are the vectors themselves, [S, H] in scale_dtype; "polar"
    keys are (r cos(a), r sin(a)) for each of H / 2 pairs, from codes radius << angle_bits | angle,
    with r = (code + 1/2) * scale + zero, or its square if `root`, and a likewise; "runs" are rows
    in a calibrated order, of channels in runs of one width each (csrc/runs.h), keys if `rotated`,
    else values; "floats" are E4M3 numbers, without scales.

    Args:
        bits: of a code.
        low_bits: of a code's first plane set.
        channels: H, or H / 2 for polar keys.
        chunks: c of the plane layout.
        width: W of the plane layout.
        slots: n of the plane layout.
        span: P of the plane layout.
        affine: the unit of scales and zero points. Stored are [S / group, H] for "token groups", [H
            / group, S] for "channel groups", [H] for "channels".
        group: tokens or channels of a group.
        heads: neighbouring heads that share scales and zero points.
        scale_dtype: of scales and zero points. 16-bit floats come as uint16 that holds their bits.
            Scales of groups of channels may also be "e8m0" or "e4m3", in uint8.
        centre: the code that stands for 0 if no zero point is stored, else None. 0 for tables.
        table: codes index a table of 2^bits entries, fp32.
        form: see above.
        pool: the tokens that share slots for outliers, which are added. 0 for no outliers.
        rotated: keys before RoPE, to be rotated.
        angle_bits: of a polar code.
        residual_dtype: of outliers.
        root: radii are stored as square roots.
        synthesis: keys in runs that a matrix makes of their channels, as it does values.
        run_channels: how many channels are stored with 1, 2, ... bits.
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
    form: Form = "codes"
    pool: int = 0
    rotated: bool = False
    angle_bits: int = 0
    residual_dtype: str = "float16"
    root: bool = False
    synthesis: bool = False
    run_channels: tuple[int, ...] = (0,) * RUN_WIDTHS

    def fields(self) -> np.ndarray:
        """Return the fields in the form that the kernels read, int64."""
        numbers: dict[str, Any] = dataclasses.asdict(self) | {
            "affine": _AFFINE.index(self.affine),
            "scale_dtype": _DTYPES.index(self.scale_dtype),
            "residual_dtype": _DTYPES.index(self.residual_dtype),
            "centre": -1 if self.centre is None else self.centre,
            "form": _FORMS.index(self.form),
        }
        return np.hstack(list(numbers.values())).astype(np.int64)
