"""Peak rates of devices, from their data sheets."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

Number: TypeAlias = int | float  # counts are whole, but rates and averages are not


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak rates from a data sheet: dense bf16 FLOP/s, and bytes/s of its memory."""

    name: str
    flops: Number
    bandwidth: Number

    @property
    def ridge(self) -> float:
        """The ridge point P, in FLOPs per byte."""
        return self.flops / self.bandwidth


DEVICES = {
    device.name: device
    for device in (
        Device("h100-pcie", 756e12, 2e12),  # the paper's
        Device("h100-sxm", 989e12, 3.35e12),
        Device("h200", 989e12, 4.8e12),
        Device("a100-80gb", 312e12, 2.039e12),
    )
}

PAPER_DEVICE = "h100-pcie"


def device(text: str) -> Device:
    """Return a device by its name in `DEVICES`, or from FLOPS:BYTES, its peak rates per second,
    such as 756e12:2e12. Rates below 1 are refused: what is divided by them could
    be infinite.

    Raises ValueError, which lists the names, for any other text.
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    flops, separator, bandwidth = text.partition(":")
    try:
        rates = float(flops), float(bandwidth)
    except ValueError:
        rates = (0.0, 0.0)
    if not separator or not all(math.isfinite(rate) and rate >= 1 for rate in rates):
        raise ValueError(
            f"device {text!r} is unknown: write one of {', '.join(DEVICES)}, or FLOPS:BYTES such as"
            " 756e12:2e12, each at least 1"
        )
    return Device(text, *rates)
