"""What counts as equal steps: rounding of logits, and single codes at ties."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from benchmarks.gpu import step_parity
from benchmarks.gpu.report import GpuReport, KernelRow
from benchmarks.gpu.step_parity import Run, compared

RNG = np.random.default_rng(0)
WANTED = Run(
    RNG.normal(size=(6, 2, 32)).astype(np.float32),
    [RNG.integers(0, 99, (4, 1000), np.int16), RNG.normal(size=(4, 90)).astype(np.float32)],
)


def row(error: float, wrong: str) -> KernelRow:
    return dataclasses.replace(
        KernelRow("parity", "", step_parity.Shape(2, 1, 1, 1, 1), "kivi", "asm"),
        error=error,
        failure=wrong,
    )


def test_rounding_passes_and_other_logits_do_not():
    assert compared(WANTED, WANTED) == (0.0, "")
    assert (
        row(*compared(dataclasses.replace(WANTED, logits=WANTED.logits * (1 + 1e-3)), WANTED)).wrong
        == ""
    )
    for other in (
        np.roll(WANTED.logits, 1, axis=0),
        np.zeros_like(WANTED.logits),
        np.full_like(WANTED.logits, np.nan),
    ):
        assert row(*compared(dataclasses.replace(WANTED, logits=other), WANTED)).wrong.startswith(
            "error"
        )


def test_rows_past_the_capacity_have_nan_in_both():
    full = WANTED.logits.copy()
    full[4:, 1] = np.nan
    both = dataclasses.replace(WANTED, logits=full)
    assert compared(both, both) == (0.0, "")
    assert np.isnan(compared(both, WANTED)[0])


def test_a_few_other_codes_pass_and_other_blocks_do_not():
    words, floats = (array.copy() for array in WANTED.stored)
    words[0, :3] += 1
    floats[0, :3] *= 1.004
    assert compared(dataclasses.replace(WANTED, stored=[words, floats]), WANTED)[1] == ""
    floats[0, :9] = 0
    assert (
        "array 1 of the cache"
        in row(*compared(dataclasses.replace(WANTED, stored=[words, floats]), WANTED)).wrong
    )
    words[1, :80] += 1
    assert (
        "array 0 of the cache"
        in row(*compared(dataclasses.replace(WANTED, stored=[words, floats]), WANTED)).wrong
    )


@pytest.mark.exhaustive
def test_interpreted_steps_are_those_of_xla(tmp_path: pathlib.Path):
    file = tmp_path / "rows.json"
    status = step_parity.main(
        [
            "--json",
            str(file),
            "--interpret",
            "--steps",
            "8",
            "--head-dim",
            "64",
            "--cache",
            "kivi:bits=4",
            "--threads",
            "1",
        ]
    )
    [found] = GpuReport.read(file).rows
    assert status == 0
    assert found.failure == ""
    assert found.error is not None
    assert 0 < found.error < found.max_error
