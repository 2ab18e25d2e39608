"""A layer of a decode step launches few kernels, whatever the batch, and no loop or branch that a graph could not capture."""

from __future__ import annotations

import pytest

from benchmarks.machine_code.launches import measure
from benchmarks.machine_code.tools import missing

pytestmark = [pytest.mark.aot, pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")]

MOST = {"kivi:bits=4": (29, 23), "innerq:bits=2": (34, 29)}  # at batch 1, where XLA cuts sums in two, and at 64


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("spec", MOST)
def test_a_layer_launches_few_kernels_at_any_batch(spec: str, batch: int):
    row = measure(spec, batch)
    assert (row.loops, row.branches) == (0, 0), f"{row.loops} loops, {row.branches} branches"
    assert row.total <= MOST[spec][batch > 1], f"{row.total} launches: {row.launches}"
    assert row.launches["decode_attention"] == 1
