"""Fixtures of the kernels' tests."""

from __future__ import annotations

import jax
import pytest
from jax.experimental.pallas import triton

from tests.pallas_kernels.emulator import execute


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute inline assembly in NumPy."""
    monkeypatch.setattr(triton, "elementwise_inline_asm", execute)


@pytest.fixture
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
