"""Formats in runs that kernels refuse. (test_decode.py compares the others with the reference.)"""

from __future__ import annotations

import pytest

from kvq_jax.codecs import kernel_readers
from tests.pallas_kernels.run_sides import run_layouts


@pytest.mark.parametrize(
    ("widths", "head_dim", "block", "reason"),
    [
        (
            "4333222222111100",
            64,
            32,
            "a run of 4 channels of 4 bits; kernels read runs of a multiple of 8 channels",
        ),
        ("4331", 64, 16, "blocks that are not a multiple of 32"),
        ("43322110", 80, 32, "head_dim 80"),
        ("43322110", 256, 32, "runs of channels at head_dim 256; kernels read them at 64 and 128"),
    ],
)
def test_what_kernels_do_not_read_has_a_reason(widths: str, head_dim: int, block: int, reason: str):
    layouts = run_layouts(widths, head_dim, block)
    for keys in (True, False):
        assert reason in str(kernel_readers.runs(layouts, head_dim, pre_rope=keys))
