"""Tests that compile for GPUs. They read its output, so nothing may come from a cache."""

import pathlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.machine_code.tools import missing


@pytest.fixture(autouse=True, scope="session")
def _compile_all() -> Iterator[None]:
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder. Without the compilers of the extra aot they are skipped."""
    lacking = missing() or ""
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(pytest.mark.aot)
            item.add_marker(pytest.mark.skipif(bool(lacking), reason=lacking))
