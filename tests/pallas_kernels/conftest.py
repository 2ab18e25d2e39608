"""Fixtures of the kernels' tests."""

import jax
import pytest
from jax.experimental.pallas import triton

from pallas_kernels.launch import Launch
from tests.pallas_kernels.emulator import Emulated, execute


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute inline assembly in NumPy."""
    monkeypatch.setattr(triton, "elementwise_inline_asm", execute)


@pytest.fixture
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")


@pytest.fixture(autouse=True)
def _what_the_launch_needs(request: pytest.FixtureRequest) -> None:
    parameters = getattr(request.node, "callspec", None)
    launch = parameters.params.get("launch") if parameters else None
    if isinstance(launch, Emulated):
        request.getfixturevalue("assembler")
    elif isinstance(launch, Launch) and not launch.interpret:
        request.getfixturevalue("gpu")
