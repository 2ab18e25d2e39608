"""Online softmax: extend and merge attention over parts of the token axis (`PartialAttention`) in
fp32, exact up to rounding.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax; Dao et al.,
FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.decode_attention.partial_attention import NEG_INF, PartialAttention


def empty(batch: int, heads: int, rows: int, head_dim: int) -> PartialAttention:
    """Return the attention over no tokens."""
    column = jnp.zeros((batch, heads, rows, 1), jnp.float32)
    return PartialAttention(
        column + NEG_INF, column, jnp.zeros((batch, heads, rows, head_dim), jnp.float32)
    )


def extend(
    part: PartialAttention,
    scores: Float[Array, "B K R C"],
    mask: Bool[Array, "#B #K #R #C"],
    weigh: Callable[[Float[Array, "B K R C"]], Float[Array, "B K R H"]],
) -> PartialAttention:
    """Add one chunk of tokens to `part`. `weigh` maps weights to weighted values. Masked tokens do
    not count, even with a score of NaN."""
    scores = jnp.where(mask, scores, NEG_INF)
    m = jnp.maximum(part.m, jnp.max(scores, axis=-1, keepdims=True))
    p = jnp.where(mask, jnp.exp(scores - m), 0)
    shrink = jnp.exp(part.m - m)
    total = part.l * shrink + jnp.sum(p, axis=-1, keepdims=True)
    return PartialAttention(m, total, part.o * shrink + weigh(p))


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Return the attention over the tokens of both parts, exact up to rounding."""
    m = jnp.maximum(a.m, b.m)
    of_a, of_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return PartialAttention(m, a.l * of_a + b.l * of_b, a.o * of_a + b.o * of_b)


def with_sinks(part: PartialAttention, sinks: Float[Array, "#B K R 1"]) -> PartialAttention:
    """Add to each query row a token without a value, whose logit is sinks[b, k, r].

    normalized(with_sinks(part, sinks)) = normalized(part) * sigmoid(lse - sinks),   lse = m + log l
    """
    m = jnp.maximum(part.m, sinks)
    shrink = jnp.exp(part.m - m)
    return PartialAttention(m, part.l * shrink + jnp.exp(sinks - m), part.o * shrink)


def across(part: PartialAttention, axis: str) -> PartialAttention:
    """Return the attention over the tokens of all shards along a mesh axis, the same on each of
    them. Exact up to rounding.

    m = pmax(m_d),   l = psum(l_d exp(m_d - m)),   o = psum(o_d exp(m_d - m))
    """
    m = lax.pmax(part.m, axis)
    o_and_l = jnp.concatenate([part.o, part.l], axis=-1) * jnp.exp(part.m - m)
    o_and_l = lax.psum(o_and_l, axis)  # one collective for both
    return PartialAttention(m, o_and_l[..., -1:], o_and_l[..., :-1])


def add_across(
    part: PartialAttention, axis: str | None, add: Callable[[PartialAttention], PartialAttention]
) -> PartialAttention:
    """Return add(part). If the tokens that `add` reads are dealt out along a mesh axis, those of
    all shards are added. The tokens of `part` are on every shard."""
    if axis is None:
        return add(part)
    return merge(part, across(add(empty(*part.o.shape)), axis))


def normalized(part: PartialAttention) -> Float[Array, "B K R H"]:
    """Return o / l, zeros for query rows that saw no token."""
    return part.o / jnp.maximum(part.l, jnp.finfo(jnp.float32).tiny)


def lse(part: PartialAttention) -> Float[Array, "B K R 1"]:
    """Return m + log l, the logarithm of the sum that the softmax divides by: about -1e30 for query
    rows that saw no token."""
    return part.m + jnp.log(jnp.maximum(part.l, jnp.finfo(jnp.float32).tiny))
