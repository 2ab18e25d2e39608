"""The benchmark of the CPU kernel beside its bounds: what it describes to the program, and its
page. The program runs with --exhaustive."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from benchmarks.cpu import roofline
from benchmarks.report_file import header
from cpu_kernels.body import RUN_WIDTHS, Body


@pytest.mark.parametrize("spec", roofline.CACHES)
def test_the_kernel_reads_every_cache_of_the_benchmark(spec: str):
    k, v = roofline.bodies(spec, 64, 1024)
    assert len(k.fields()) == len(v.fields()) == len(Body.__dataclass_fields__) - 1 + RUN_WIDTHS, (
        "a number for each field, and for each width"
    )


def test_the_page_compares_with_the_larger_bound(tmp_path: pathlib.Path):
    rows = (
        roofline.RooflineRow("dense", 64, 4.0, 0.5, 1.25),
        roofline.RooflineRow("kivi:bits=2", 64, 0.25, 0.2, 0.0),
    )
    machine = {
        "cpu": "c",
        "kernel": "avx512",
        "lanes": 16,
        "multiplied": 2.5,
        "read_rate": 20.0,
        "query_rows": 4,
        "tokens": 4096,
    }
    report = roofline.RooflineReport(title="T", **header(("x",)), **machine, rows=rows)
    report.write(tmp_path / "roofline.json")
    assert roofline.RooflineReport.read(tmp_path / "roofline.json") == report
    text = roofline.page(report, tmp_path / "roofline.json")
    assert "| 64 | dense | 4.00 | 0.200 | 0.100 | 0.500 | 2.5 | 1.25 |" in text, "bound by bytes"
    assert "| 64 | kivi:bits=2 | 0.25 | 0.013 | 0.100 | 0.200 | 2.0 | - |" in text, (
        "bound by products"
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
