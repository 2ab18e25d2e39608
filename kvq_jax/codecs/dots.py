"""Dot products of attention. The query rows of a KV head are the rows of one dot, so keys and
values are never repeated."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def dot_rows(
    q: Float[Array, "B K R H"], k: Float[Array, "B K C H"], precision: lax.Precision | None = None
) -> Float[Array, "B K R C"]:
    """Return q . k in fp32.

    The query rows of a KV head are the rows of one dot, so K is never repeated.

    precision: the precision of fp32 factors on a GPU.
    """
    q = q.astype(k.dtype)
    if q.shape[2] >= k.shape[2]:
        return jnp.einsum(
            "bkrh,bkch->bkrc", q, k, precision=precision, preferred_element_type=jnp.float32
        )
    # The longer operand on the left: twice as fast in decoding on a CPU, which transposes a copy of
    # the other (docs/decisions/streaming_attention.md). The reshapes keep XLA from folding the
    # transposition into the dot, which would exchange the operands again.
    batch, heads, tokens, head_dim = k.shape
    merged = jnp.einsum(
        "nch,nrh->ncr",
        k.reshape(-1, tokens, head_dim),
        q.reshape(batch * heads, -1, head_dim),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return jnp.swapaxes(merged.reshape(batch, heads, tokens, -1), 2, 3)


def weigh_rows(p: Float[Array, "B K R C"], v: Float[Array, "B K C H"]) -> Float[Array, "B K R H"]:
    """Return p . v in fp32."""
    return jnp.einsum("bkrc,bkch->bkrh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
