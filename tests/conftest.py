"""Settings of every test: JAX in its strict modes, quick compilation, property tests that draw the same examples each time."""

from __future__ import annotations

import os
import shutil

import hypothesis
import jax

from tests.compile_options import QUICK_FLAGS

# XLA reads this at the first compilation. A GPU's tests are of what its compiler makes.
if shutil.which("nvidia-smi") is None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("kvq", derandomize=True, deadline=None, max_examples=50, database=None)
hypothesis.settings.load_profile("kvq")
