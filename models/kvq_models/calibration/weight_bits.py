"""The numbers of values that a quantized weight can take."""

from __future__ import annotations

BITS = (2, 3, 4)  # a weight takes one of 2^bits values of its output channel
