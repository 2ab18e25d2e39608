"""Decode attention over the body of a cache, and its windows, in C++ on the threads of XLA.

    s_t = c tanh(scale q . k_t / c), or scale q . k_t
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
        turns: for keys before RoPE, the cosines and sines that rotate them, times RoPE's attention
            factor.
    """

    q: Float[Array, "B K R H"]
    seen: Bool[Array, "B E"]
    keys: tuple[Float[Array, "B K E0 H"], Float[Array, "B K E1 H"]]
    values: tuple[Float[Array, "B K E0 H"], Float[Array, "B K E1 H"]]
    turns: tuple[Float[Array, "B E half"], Float[Array, "B E half"]] | tuple[()] = ()


class Ring(NamedTuple):
    """A body whose newer tokens take the places of older ones: token t lies at place t % tokens.

    Args:
        tokens: the places. Behind them, up to `capacity`, the arrays may hold anything.
        written: how many tokens were written so far.
        q_before: for keys before RoPE, whose positions are counted from the ring's first place. q
            reads those of the round that began last, q_before those of the round before.
    """

    tokens: int
    written: Int[Array, " B"]
    q_before: Float[Array, "B K R H"] | None = None


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
    lower: Int[Array, "B T"] | None = None,
    ring: Ring | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B K R 1"], Float[Array, "B K R 1"], Float[Array, "B K R H"]]:
    """Return (m, l, o), fp32, of R = G * T query rows per KV head. Row g * T + t sees the
    tokens lower[b, t] .. limits[b, t] - 1.

    Everything is computed in fp32. m is -1e30 if a row sees nothing.

    Args:
        q: not scaled.
        keys: a description and the stored arrays [B, K, ...]: words of each plane set, a table if
            there is one, the scale, the zero point if one is stored, and the description's other
            arrays (csrc/ffi.cc).
        values: the same for values.
        limits: the token behind the last one that each query sees. Tokens behind every limit, or
            below every lower limit, may hold anything.
        capacity: S, the number of tokens that the arrays have room for.
        windows: attended to as well. T must be 1. Their keys are rotated if those of the body are.
        lower: the first token that each query sees. None: token 0.
        ring: the body's, if it is one. None: token t lies at place t.
        scale: the factor of scores. None: H ** -0.5.
        soft_cap: c above, positive. None for none.

    Raises ValueError if the library is missing, or the soft cap is not positive. Arrays that do not
    fit the descriptions are an XLA error when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, or None for none, got {soft_cap}")
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
        arrays += windows.turns
    if lower is not None:
        arrays.append(lower.astype(jnp.int32))
    if ring is not None:
        arrays.append(ring.written.astype(jnp.int32))
        if ring.q_before is not None:
            arrays.append(ring.q_before.astype(jnp.float32))
    m, l, o = call(
        *arrays,
        keys=k.fields(),
        values=v.fields(),
        capacity=np.int64(capacity),
        windows=windows is not None,
        bounded=lower is not None,
        ring=np.int64(0 if ring is None else ring.tokens),
        scale=np.float32(q.shape[3] ** -0.5 if scale is None else scale),
        soft_cap=np.float32(soft_cap or 0),
    )
    return m, l, o
