"""Attention over some of the tokens, in a form in which parts can be merged exactly.

    m = max_t s_t,    l = sum_t exp(s_t - m),    o = sum_t exp(s_t - m) v_t

This module imports no Pallas: the XLA path merges the results of kernels with its own.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

NEG_INF = -1e30  # finite, so that a part without any valid token merges without NaN
# Kernels round weights to fp16, which loses anything below 6e-8. So most lower m by this power of
# two: the largest weight is then 2^15, and 128K tokens with 1e-8 of a sink's weight each do not
# vanish beside it. Readers that round a weight times a token's scale lower m less, or not at all
# (`Reader.weight_exponent`): the product must not overflow.
WEIGHT_EXPONENT = 15


class PartialAttention(NamedTuple):
    """m, l [B, K, R, 1] and o [B, K, R, H], fp32, for R query rows per KV head."""

    m: Float[Array, "B K R 1"]
    l: Float[Array, "B K R 1"]
    o: Float[Array, "B K R H"]


class Splits(NamedTuple):
    """Parts as kernels write them, fp32, P for each KV head, with query heads padded to a power of
    two, R.

    m is in units of log2, and at least the largest score minus WEIGHT_EXPONENT. l and o are sums of
    2^(s_t - m).
    """

    m: Float[Array, "B K P R"]
    l: Float[Array, "B K P R"]
    o: Float[Array, "B K P H R"]
