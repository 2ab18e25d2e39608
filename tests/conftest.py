"""Settings of every test: JAX in its strict modes, quick compilation, property tests that draw the
same examples each time."""

import os
import pathlib
import shutil

import hypothesis
import jax
import pytest

from tests.compile_options import QUICK_FLAGS
from tests.methods_table import METHOD_CASES, MethodCase

# the hook that checks types expects its checker imported
pytest_plugins = ["tests.fixtures", "tests.type_checker", "tests.worker_resources"]

# XLA reads this at the first compilation. A GPU's tests are of what its compiler makes.
if shutil.which("nvidia-smi") is None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()

os.environ.pop("PYTHONUNBUFFERED", None)  # commands that tests start write into pipes as users' do

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "kvq", derandomize=True, deadline=None, max_examples=50, database=None
)
hypothesis.settings.load_profile("kvq")

# The files that take longest, in order: a long file that comes last keeps one worker busy while the
# other waits.
LONGEST_FILES = (
    "tests/test_multi_device.py",
    "tests/kvq_models/inference/test_decoding.py",
    "tests/kvq_tools/cli/test_cli_calibration.py",
    "tests/kvq_tools/evaluation/test_lm_eval_model.py",
    "tests/kvq_tools/report/test_report.py",
    "tests/test_own_model.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run slow tests over all their cases, not over one of each kind",
    )


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leave the tests that compile for GPUs unread if none of them would run: their imports take
    seconds, in every worker."""
    unwanted = "not aot" in config.getoption("markexpr") and collection_path.name == "aot"
    return True if unwanted else None


def pytest_report_header() -> str:
    from kvq_jax.attention import dispatch  # not before the hook that checks types

    return f"kernels here: {dispatch.kernels_here()}"


def place(item: pytest.Item) -> tuple[int, int]:
    """Return where a test runs: those of layers and caches over the table of methods first, row by
    row, as the tests of a row in all files run the same compiled functions; then the longest files;
    the others keep their order."""
    file, callspec = item.nodeid.partition("::")[0], getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    if isinstance(case, MethodCase) and file.startswith("tests/kvq_jax/"):
        return 0, METHOD_CASES.index(case)
    return 1, LONGEST_FILES.index(file) if file in LONGEST_FILES else len(LONGEST_FILES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by their places. Leave rows of the table out unless they were asked for."""
    items.sort(key=place)
    if not config.getoption("--exhaustive"):
        others = {
            item
            for item in items
            if item.get_closest_marker("exhaustive") and not item.get_closest_marker("gpu")
        }
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
