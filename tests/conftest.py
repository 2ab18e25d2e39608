"""Settings of every test: JAX in its strict modes, quick compilation, property tests that draw the same examples each time."""

from __future__ import annotations

import os
import shutil

import hypothesis
import jax
import pytest

from tests.compile_options import QUICK_FLAGS

# the hook that checks types expects its checker imported
pytest_plugins = ["tests.fixtures", "tests.type_checker", "tests.worker_resources"]

# XLA reads this at the first compilation. A GPU's tests are of what its compiler makes.
if shutil.which("nvidia-smi") is None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("kvq", derandomize=True, deadline=None, max_examples=50, database=None)
hypothesis.settings.load_profile("kvq")

# The files that take longest, in order: a long file that comes last keeps one worker busy while the other waits.
LONGEST = (
    "tests/kvq_jax/cache/test_cache_laws.py",
    "tests/benchmarks/gpu/test_kernel_benchmarks.py",
    "tests/benchmarks/quality/test_quality.py",
    "tests/kvq_jax/attention/test_streaming_attention.py",
    "tests/kvq_models/inference/test_decoding.py",
    "tests/benchmarks/gpu/test_random_bodies.py",
    "tests/kvq_tools/cli/test_cli_calibration.py",
    "tests/kvq_tools/evaluation/test_lm_eval_model.py",
    "tests/kvq_tools/report/test_report.py",
    "tests/benchmarks/quality/test_key_bias.py",
    "tests/test_own_model.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run slow tests over all their cases, not over one of each kind")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files to the front; the others keep their order. Leave rows of the table out unless they were asked for."""
    places = {file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    if not config.getoption("--exhaustive"):
        others = {item for item in items if item.get_closest_marker("exhaustive") and not item.get_closest_marker("gpu")}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
