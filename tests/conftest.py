"""Settings of every test: JAX in its strict modes, property tests that draw the same examples each time."""

from __future__ import annotations

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("kvq", derandomize=True, deadline=None, max_examples=50, database=None)
hypothesis.settings.load_profile("kvq")
