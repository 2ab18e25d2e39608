"""Decode attention over the body of a cache, and its windows, in C++ on the threads of XLA.

    s_t = q . k_t / sqrt(H)
    m = max_t s_t,    l = sum_t exp(s_t - m),    o = sum_t exp(s_t - m) v_t

Each task reads up to 1024 tokens of one KV head, for all of its query rows, with online softmax in
fp32. Tasks are merged exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cpu_kernels.body import Body
from cpu_kernels.library import DECODE_ATTENTION, unavailable


class ExactRows(NamedTuple):
    """Tokens in full precision (fp32, fp16 or bf16), in two windows of any length.

    Args:
        q: the queries that read them, one per head, not scaled.
        seen: which tokens count, first those of the first window. The others may hold anything.
        keys: of the two windows.
        values: of the two windows.
    """

    q: Float[Array, "B K R H"]
    seen: Bool[Array, "B E"]
    keys: tuple[Float[Array, "B K E0 H"], Float[Array, "B K E1 H"]]
    values: tuple[Float[Array, "B K E0 H"], Float[Array, "B K E1 H"]]


# How many neighbouring keys before RoPE are rotated from the position of the first one (kDecoded of
# csrc/body.h).
TOGETHER = 32
NEAR = 256  # how many such runs have positions counted from the first of them (kNear)
WINDOW_DTYPES = ("float32", "float16", "bfloat16")


def decode_attention(
    q: Float[Array, "B K R H"],
    keys: tuple[Body, Sequence[Array]],
    values: tuple[Body, Sequence[Array]],
    limits: Int[Array, "B T"],
    *,
    capacity: int,
    windows: ExactRows | None = None,
) -> tuple[Float[Array, "B K R 1"], Float[Array, "B K R 1"], Float[Array, "B K R H"]]:
    """Return (m, l, o), fp32, of R = G * T query rows per KV head. Row g * T + t sees the first
    limits[b, t] tokens.

    Everything is computed in fp32. m is -1e30 if a row sees nothing.

    Args:
        q: not scaled.
        keys: a description and the stored arrays [B, K, ...]: words of each plane set, a table if
            there is one, the scale, the zero point if one is stored, and the description's other
            arrays (csrc/ffi.cc).
        values: the same for values.
        limits: how many tokens each query sees. Tokens beyond may hold anything.
        capacity: S, the number of tokens that the arrays have room for.
        windows: attended to as well. T must be 1.

    Raises ValueError if the library is missing. Arrays that do not fit the descriptions are an XLA
    error when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    (k, k_arrays), (v, v_arrays) = keys, values
    columns = jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32)
    call = jax.ffi.ffi_call(
        DECODE_ATTENTION,
        (columns, columns, jax.ShapeDtypeStruct(q.shape, jnp.float32)),
        vmap_method="sequential",
    )
    arrays = [q.astype(jnp.float32), limits.astype(jnp.int32), *k_arrays, *v_arrays]
    if windows is not None:
        arrays += [windows.q.astype(jnp.float32), windows.seen, *windows.keys, *windows.values]
    m, l, o = call(
        *arrays,
        keys=k.fields(),
        values=v.fields(),
        capacity=np.int64(capacity),
        windows=windows is not None,
    )
    return m, l, o
