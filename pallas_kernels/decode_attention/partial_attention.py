"""Attention over a part of the tokens, in the form in which parts are merged exactly.

    m = max_t s_t,    l = sum_t exp(s_t - m),    o = sum_t exp(s_t - m) v_t

This module imports no Pallas: the XLA path merges what kernels return with what it has computed
itself.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

NEG_INF = -1e30  # finite, so that a part without any valid token merges without nan
# Kernels round weights to fp16, below whose 6e-8 nothing is left: they take m lower by this many
# powers of two, so that the largest weight is 2^15, and 128K tokens that have 1e-8 of a sink's
# weight each do not vanish beside it.
WEIGHT_EXPONENT = 15


class PartialAttention(NamedTuple):
    """m, l [B, K, R, 1] and o [B, K, R, H] of R query rows for each KV head, fp32."""

    m: Float[Array, "B K R 1"]
    l: Float[Array, "B K R 1"]
    o: Float[Array, "B K R H"]


class Splits(NamedTuple):
    """Parts as kernels write them, P of them for each KV head, fp32: m in units of log2, R query
    heads padded to a power of two.

    m is no less than the largest score minus WEIGHT_EXPONENT; l and o are sums of 2^(s_t - m).
    """

    m: Float[Array, "B K P R"]
    l: Float[Array, "B K P R"]
    o: Float[Array, "B K P H R"]
