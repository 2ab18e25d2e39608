"""Online softmax: attention over parts of the token axis, merged exactly.

A part is (m, l, o): m the largest score, l = sum exp(s - m), o = sum exp(s - m) v, all fp32. Source: Milakov and Gimelshein, Online
normalizer calculation for softmax; Dao et al., FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

NEG = -1e30  # stands for -inf: finite, so that a part without any valid token merges without nan


class Part(NamedTuple):
    """m, l [B, K, R, 1] and o [B, K, R, H] of R query rows for each KV head."""

    m: Float[Array, "B K R 1"]
    l: Float[Array, "B K R 1"]  # noqa: E741  # the name of this sum everywhere in the literature
    o: Float[Array, "B K R H"]


def empty(batch: int, heads: int, rows: int, head_dim: int) -> Part:
    """The part that holds no token."""
    column = jnp.zeros((batch, heads, rows, 1), jnp.float32)
    return Part(column + NEG, column, jnp.zeros((batch, heads, rows, head_dim), jnp.float32))


def extend(
    part: Part,
    scores: Float[Array, "B K R C"],
    mask: Bool[Array, "#B #K #R #C"],
    weigh: Callable[[Float[Array, "B K R C"]], Float[Array, "B K R H"]],
) -> Part:
    """`part` with the tokens of one chunk added; `weigh` maps weights to weighted values. A nan score of a masked token does not count."""
    scores = jnp.where(mask, scores, NEG)
    m = jnp.maximum(part.m, jnp.max(scores, axis=-1, keepdims=True))
    p = jnp.where(mask, jnp.exp(scores - m), 0)
    shrink = jnp.exp(part.m - m)
    return Part(m, part.l * shrink + jnp.sum(p, axis=-1, keepdims=True), part.o * shrink + weigh(p))


def merge(a: Part, b: Part) -> Part:
    """The part that holds the tokens of both, exactly."""
    m = jnp.maximum(a.m, b.m)
    of_a, of_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Part(m, a.l * of_a + b.l * of_b, a.o * of_a + b.o * of_b)


def finish(part: Part) -> Float[Array, "B K R H"]:
    """o / l; zeros for query rows that saw no token."""
    return part.o / jnp.maximum(part.l, jnp.finfo(jnp.float32).tiny)
