"""Compare two distributions over the vocabulary: p of the full-precision model and q through a
cache.

    nats = -log q(token)
    KL(p || q) = sum_v p(v) (log p(v) - log q(v))
    agrees: argmax p == argmax q

The sum is taken over p (e^d - 1 - d), d = log q - log p. It is the same because p and q both add up
to 1. But every term is at least 0, and the rounding of the normalizers enters squared, so equal
distributions give 0. fp32; no second array of the logits' size is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Terms(NamedTuple):
    """One entry for each predicted token."""

    nats: Float[Array, "B T"]
    kl: Float[Array, "B T"]
    agrees: Bool[Array, "B T"]


def token_nats(logits: Float[Array, "B T V"], following: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return -log p(following token)."""
    target = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target


def compare(
    logits: Float[Array, "B T V"], exact: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> Terms:
    """Compare q, from `logits`, with p, from `exact`, both fp32."""
    log_q = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_p = exact - jax.nn.logsumexp(exact, axis=-1, keepdims=True)
    p, q, d = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
    near = p * (jnp.expm1(jnp.minimum(d, 1)) - d)
    kl = jnp.sum(jnp.where(d < 1, near, q - p - p * d), axis=-1)  # e^d may be too large for a float
    return Terms(
        token_nats(logits, following), kl, jnp.argmax(logits, axis=-1) == jnp.argmax(exact, axis=-1)
    )
