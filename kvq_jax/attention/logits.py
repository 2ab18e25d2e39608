"""The logits of a layer's softmax, and the tokens inside its window, as its `Attention` says."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.layer.attention import Attention


def attention_logits(
    attention: Attention, products: Float[Array, "..."], head_dim: int
) -> Float[Array, "..."]:
    """Return c tanh(scale q . k / c) from products q . k, or scale q . k without a soft cap."""
    logits = products * attention.factor(head_dim)
    if attention.soft_cap is None:
        return logits
    return attention.soft_cap * jnp.tanh(logits / attention.soft_cap)


def first_inside(
    attention: Attention, sink: int, queries: Int[Array, "..."]
) -> Int[Array, "..."] | None:
    """Return the first body token inside the windows of queries at these positions, behind a sink
    of `sink` tokens. None without a window."""
    if attention.window is None:
        return None
    return jnp.maximum(queries - attention.window + 1 - sink, 0)


def inside_window(
    attention: Attention, queries: Int[Array, "..."], positions: Int[Array, "..."]
) -> Bool[Array, "..."] | bool:
    """Return a mask of the positions that are inside the windows of queries at these positions.
    Positions after a query count as inside."""
    return True if attention.window is None else positions > queries - attention.window
