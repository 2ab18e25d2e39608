"""Settings of every test: JAX in its strict modes, quick compilation, property tests that draw the same examples each time."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from tests.compile_options import QUICK_FLAGS

pytest_plugins = ["tests.fixtures", "tests.type_checker"]  # the hook that checks types expects its checker imported

# XLA reads this at the first compilation. A GPU's tests are of what its compiler makes.
if shutil.which("nvidia-smi") is None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("kvq", derandomize=True, deadline=None, max_examples=50, database=None)
hypothesis.settings.load_profile("kvq")

MOST_MAPPINGS = 20_000  # of the 65530 that Linux allows a process; each compiled program takes several, and past the limit LLVM crashes


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs() -> Iterator[None]:
    """Drops compiled programs after a module, once they have become many."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()
