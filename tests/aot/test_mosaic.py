"""Decode attention on Mosaic GPU compiles without a GPU and keeps its limits: instructions, spills,
registers, waiting loads. Its committed counts do too."""

import dataclasses
import itertools
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.machine_code.attentions import ATTENTIONS, Attention
from benchmarks.machine_code.case import Case
from benchmarks.machine_code.compile import AbsentGpu
from benchmarks.machine_code.report import Instructions, KernelReport
from benchmarks.machine_code.target import ARCHITECTURES, BY_NAME
from benchmarks.results_page import RESULTS
from tests.exhaustive import some
from tests.pallas_kernels.lowering import needs_mosaic

ROOT = pathlib.Path(__file__).parents[2]
COMMITTED = [
    row
    for file in sorted(RESULTS.glob("instructions_routes*.json"))
    for row in Instructions.read(file).rows
    if row.name.endswith(", mosaic")
]
BY_CASE = {attention.name: attention for attention in ATTENTIONS}
# Groups of channels and of tokens; the copy engine, and asynchronous copies without it.
USUAL = [("innerq, 2-bit sym, H 128", "h200"), ("kivi, 4-bit, H 128", "a100")]


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "target"), some(itertools.product(BY_CASE, BY_NAME), USUAL), ids=str
)
def test_a_case_keeps_its_limits(name: str, target: str):
    """The command says which limits are broken. A process compiles for one GPU."""
    case = ["--route", "mosaic", "--target", target, "--case", f"^{re.escape(name)}$"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machine_code.routes", *case],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {target} " in done.stdout


def case_of(row: KernelReport, attention: Attention) -> Case:
    return attention.case("mosaic", BY_NAME[row.target])


def test_the_committed_counts_are_within_the_limits_of_their_cases():
    failures = []
    for row in COMMITTED:
        attention = BY_CASE[row.name.removesuffix(", mosaic")]
        failures += case_of(row, attention).failures(row)
    assert not failures, "\n".join(failures)
    assert {target for _, target in USUAL} <= {row.target for row in COMMITTED}


def test_a_limit_that_is_broken_is_told():
    row = COMMITTED[0]
    attention = BY_CASE[row.name.removesuffix(", mosaic")]
    strict = dataclasses.replace(attention, cap_instructions=1.0, multiply_adds=8)
    told = "\n".join(case_of(row, strict).failures(row))
    assert "instructions per element, at most 1.0" in told
    assert "multiply-adds per element, not 8" in told


def test_an_absent_gpu_has_its_capability():
    assert {target.name: AbsentGpu.of(target).compute_capability for target in ARCHITECTURES} == {
        "a100": "8.0",
        "l40": "8.9",
        "h200": "9.0",
        "b200": "10.0",
    }
