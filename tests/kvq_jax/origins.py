"""Origins of rows for codecs that do not ask where tokens stand."""

import jax
import jax.numpy as jnp

from kvq_jax.codecs.codec import TokensAt

PROMPT = TokensAt(jnp.zeros((1, 1), jnp.int32), prefill=True)
GENERATED = TokensAt(jnp.zeros((1, 1), jnp.int32), prefill=False)


def prompt(rows: jax.Array) -> TokensAt:
    """Return the origin of rows [B, K, T, C] of a prompt that starts with them."""
    return TokensAt(jnp.arange(rows.shape[2], dtype=jnp.int32)[None], prefill=True)
