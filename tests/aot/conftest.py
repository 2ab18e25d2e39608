"""Fixtures of tests that compile for GPUs. They read the compiler's output, so nothing may come
from a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="session")
def _compile_all() -> Iterator[None]:
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
