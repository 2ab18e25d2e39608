"""What tests of the kernels' assembly share."""

from __future__ import annotations

import pytest
from jax.experimental.pallas import triton

from tests.pallas_kernels.emulator import execute


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inline assembly is executed in NumPy."""
    monkeypatch.setattr(triton, "elementwise_inline_asm", execute)
