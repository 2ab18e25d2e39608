"""The benchmark of the CPU kernel beside its bounds: what it describes to the program, and its
page. The program runs with --exhaustive."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.cpu import roofline
from cpu_kernels.body import RUN_WIDTHS, Body


@pytest.mark.parametrize("spec", roofline.CACHES)
def test_the_kernel_reads_every_cache_of_the_benchmark(spec: str):
    k, v = roofline.bodies(spec, 64, 1024)
    assert len(k.fields()) == len(v.fields()) == len(Body.__dataclass_fields__) - 1 + RUN_WIDTHS, (
        "a number for each field, and for each width"
    )


@pytest.fixture
def compiler() -> str:
    try:
        return roofline.compiler()
    except ValueError as error:
        pytest.skip(str(error))


def test_the_program_fits_the_kernel_that_it_times(compiler: str):
    text = roofline.PROGRAM.read_text(encoding="utf-8")
    fits, *others = (
        _parsed(compiler, program)
        for program in (text, text.replace("side.turns = {turns, ", "side.turns = {"))
    )
    assert not fits, fits
    assert all("error" in other for other in others), "a table of turns too few is noticed"


def _parsed(compiler: str, program: str) -> str:
    words = (compiler, "-std=c++17", "-fsyntax-only", f"-I{roofline.SOURCES}", "-x", "c++", "-")
    return subprocess.run(words, input=program, capture_output=True, text=True, check=False).stderr
