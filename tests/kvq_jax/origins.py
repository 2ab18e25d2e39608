"""Origins of rows for codecs that do not ask where tokens stand."""

from __future__ import annotations

import jax.numpy as jnp

from kvq_jax.codecs.codec import Origin

PROMPT = Origin(jnp.zeros((1, 1), jnp.int32), prefill=True)
GENERATED = Origin(jnp.zeros((1, 1), jnp.int32), prefill=False)
