"""Attention of many query tokens over rows in full precision, in C++ on the threads of XLA.

    s_t = scale q . k_t
    m = max_t s_t,    l = sum_t exp(s_t - m),    o = sum_t exp(s_t - m) v_t

No matrix of scores exists: a task takes up to 384 query rows of one KV head through the keys, 256
at a time, with online softmax in fp32 (Dao et al., FlashAttention).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cpu_kernels.library import EXACT_ATTENTION, unavailable

DTYPES = ("float32", "float16", "bfloat16")  # of keys and values
MOST_CHANNELS = 1024
MOST_GROUP = 96  # query heads of one KV head


def exact_attention(
    q: Float[Array, "B K R H"],
    keys: Float[Array, "B K E H"],
    values: Float[Array, "B K E H"],
    seen: Bool[Array, "B E0"],
    counts: Int[Array, "B T"],
    *,
    scale: float,
) -> tuple[Float[Array, "B K R 1"], Float[Array, "B K R 1"], Float[Array, "B K R H"]]:
    """Return (m, l, o), fp32, of R = G * T query rows per KV head.

    Row g * T + t sees the rows that `seen` marks among the first E0, and the first counts[b, t] of
    the others. Rows that nobody sees may hold anything. m is -1e30 and l and o are 0 if a query
    sees nothing.

    Args:
        q: [B, K, R, H], any float dtype, not scaled.
        keys: [B, K, E, H], one of DTYPES.
        values: [B, K, E, H], the dtype of keys.
        seen: [B, E0], E0 <= E, the same for all queries of a row of the batch.
        counts: [B, T], not falling along T.
        scale: the factor of the scores.

    Raises ValueError if the library is missing. Arrays that do not fit together are an XLA error
    when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    columns = jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32)
    call = jax.ffi.ffi_call(
        EXACT_ATTENTION,
        (columns, columns, jax.ShapeDtypeStruct(q.shape, jnp.float32)),
        vmap_method="sequential",
    )
    arrays = q.astype(jnp.float32), keys, values, seen, counts.astype(jnp.int32)
    m, l, o = call(*arrays, scale=np.float32(scale))
    return m, l, o
