"""Attention of many query tokens over rows in full precision, in C++ on the threads of XLA.

    s_t = c tanh(scale q . k_t / c), or scale q . k_t
    m = max_t s_t,    l = sum_t exp(s_t - m),    o = sum_t exp(s_t - m) v_t

No matrix of scores exists: a task takes up to 384 query rows of one KV head through the keys, 256
at a time, with online softmax in fp32 (Dao et al., FlashAttention).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cpu_kernels.body import MAX_CHANNELS as MAX_CHANNELS
from cpu_kernels.library import EXACT_ATTENTION, unavailable

DTYPES = ("float32", "float16", "bfloat16")  # of keys and values


def exact_attention(
    q: Float[Array, "B K R H"],
    keys: Float[Array, "B K E H"],
    values: Float[Array, "B K E H"],
    reach: Int[Array, "B E0"],
    counts: Int[Array, "B T"],
    queries: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B K R 1"], Float[Array, "B K R 1"], Float[Array, "B K R H"]]:
    """Return (m, l, o), fp32, of R = G * T query rows per KV head.

    Row g * T + t sees those of the first E0 rows whose reach[b, e] is above t, and the first
    counts[b, t] of the others, with a window only those from t - window + 1 on. Tokens from
    queries[b] on are padding: they cost nothing and see nothing. Rows that nobody sees may hold
    anything, and blocks that no query of a task sees are skipped. m is -1e30 and l and o are 0 if a
    query sees nothing.

    Args:
        q: [B, K, R, H], any float dtype, not scaled.
        keys: [B, K, E, H], one of DTYPES.
        values: [B, K, E, H], the dtype of keys.
        reach: [B, E0], E0 <= E, how many queries see an older row: the first ones.
        counts: [B, T], not falling along T.
        queries: [B], the number of tokens that are not padding, at most T.
        scale: the factor of the scores.
        window: how many of the others a query sees, at most, from 1 on. None for all.
        soft_cap: c above, positive. None for none.

    Raises ValueError if the library is missing, or a window or a soft cap is not positive. Arrays
    that do not fit together are an XLA error when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for none, got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, or None for none, got {soft_cap}")
    columns = jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32)
    call = jax.ffi.ffi_call(
        EXACT_ATTENTION,
        (columns, columns, jax.ShapeDtypeStruct(q.shape, jnp.float32)),
        vmap_method="sequential",
    )
    m, l, o = call(
        q.astype(jnp.float32),
        keys,
        values,
        *(a.astype(jnp.int32) for a in (reach, counts, queries)),
        window=np.int64(window or 0),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
    )
    return m, l, o
