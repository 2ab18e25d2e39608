"""Attention over a part of the tokens, in the form in which parts are merged exactly.

    m = max_t s_t,    l = sum_t exp(s_t - m),    o = sum_t exp(s_t - m) v_t

This module imports no Pallas: the XLA path merges what kernels return with what it has computed itself.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

NEG_INF = -1e30  # finite, so that a part without any valid token merges without nan


class PartialAttention(NamedTuple):
    """m, l [B, K, R, 1] and o [B, K, R, H] of R query rows for each KV head, fp32."""

    m: Float[Array, "B K R 1"]
    l: Float[Array, "B K R 1"]
    o: Float[Array, "B K R H"]
