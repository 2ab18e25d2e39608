"""Kernels compiled for GPUs keep their limits: instructions per cached element, waiting loads,
spills.
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.machine_code import __main__
from benchmarks.machine_code.__main__ import WATCHED
from benchmarks.machine_code.case import Case
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.limits import A100_LIMITS, NEWER_LIMITS
from benchmarks.machine_code.report import HEADER, Instructions, measure
from benchmarks.machine_code.target import H200, TARGETS
from tests.aot.tiny_kernel import dense_attention
from tests.exhaustive import some

# Compiling all kernels takes seven to eleven minutes of a core for each GPU. The usual ones have
# each reader, width of head and arithmetic once. --exhaustive compiles all for an H200. The command
# compiles all for both GPUs, and fails if a limit is broken.
ON_AN_A100 = (
    "innerq, 2-bit sym, H 128, asm",
    "innerq, 3-bit hybrid, H 128, asm",
    "kivi, 4-bit, H 128, jnp",
)
USUAL = (
    "innerq, 2-bit sym, H 128, asm",
    *(f"innerq, 2-bit sym, H {size}, asm" for size in ("64", "256", "128, 16 query heads")),
    "innerq, 3-bit hybrid, H 128, asm",
    "innerq, 8-bit sym, H 128, asm",
    "kivi, 4-bit, H 128, asm",
    "kivi, 4-bit, H 128, jnp",
    "kivi, 4-bit, before RoPE, H 128, asm",
    "nuq4-1%, before RoPE, H 128, asm",
    "nf4, groups of 64, H 128, asm",
    "dense, bf16, H 128, asm",
    "waterfill, 2.5 bits, H 128, asm",
    "polar 4+4, groups of 128, 4-bit values, H 128, asm",
    "kivi, 4-bit, groups of 128 tokens, H 128, asm",
    "quantize, 3-bit hybrid, groups of channels, H 128, asm",
)
USUAL_ON_AN_A100 = ON_AN_A100[:1]
WITH_TARGET = [
    *((case, "h200") for case in WATCHED),
    *((case, "a100") for case in WATCHED if case.name in ON_AN_A100),
]


def test_cases_have_names_of_their_own():
    names = [case.name for case in WATCHED]
    assert len(set(names)) == len(names)
    assert set(USUAL) <= set(names)
    assert A100_LIMITS.keys() | NEWER_LIMITS.keys() <= set(names)


@pytest.mark.parametrize(
    ("case", "target"),
    some(
        WITH_TARGET,
        [
            (case, target)
            for case, target in WITH_TARGET
            if case.name in (USUAL_ON_AN_A100 if target == "a100" else USUAL)
        ],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_case_keeps_its_limits(case: Case, target: str):
    report = case.measure(TARGETS[target])
    assert not case.failures(report), "\n".join([*case.failures(report), f"{report}"])


def test_a_limit_that_is_broken_is_told():
    case = Case(
        "dense",
        dense_attention,
        "dense_attention",
        64 * 128,
        16,
        cap_instructions=0.5,
        cap_alu=0.1,
        min_share=1,
        cap_spill_bytes=-1,
    )
    failures = "\n".join(case.failures(case.measure(H200)))
    assert "instructions per element, at most 0.5" in failures
    assert "integer operations and conversions per element, at most 0.1" in failures
    assert "16 multiply-adds per element, not 8" in failures, (
        "the loop reads twice as many elements as this case says"
    )
    assert "0 bytes spilled, at most -1" in failures
    assert "spills" not in failures
    assert "asynchronous" not in failures


@pytest.mark.parametrize(("warps", "columns"), [(1, 8), (4, 16)])
def test_every_warp_and_column_counts(warps: int, columns: int):
    function, arguments = dense_attention(warps=warps, columns=columns, tokens=1024)
    kernel = compile_for(H200, function, arguments).kernel("dense_attention")
    report = measure("dense", kernel, H200, elements_per_iteration=64 * 128 * 2, stored_bits=16)
    assert report.threads == 32 * warps
    assert report.mma_columns == columns
    assert report.shared_bytes > 0
    assert report.loop_instructions > 0


def test_a_program_has_its_memory_and_its_optimized_hlo():
    program = compile_for(
        H200, lambda x: jnp.sin(x) + 1, (jax.ShapeDtypeStruct((1024, 256), jnp.float32),)
    )
    assert program.compiled.memory_analysis().argument_size_in_bytes == 1024 * 256 * 4
    assert "fusion" in program.compiled.as_text()
    assert ".target sm_90a" in next(iter(program.kernels.values())).ptx
    with pytest.raises(ValueError, match="one match is needed"):
        program.kernel("attend")


def test_the_command_writes_what_it_prints(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "instructions.json"
    __main__.main(
        ["--case", f"^{re.escape(WATCHED[0].name)}$", "--target", "h200", "--json", str(file)]
    )
    printed = capsys.readouterr()
    assert "[1/1]" in printed.err
    (row,) = Instructions.read(file).rows
    assert printed.out.splitlines()[0] == "| " + " | ".join(HEADER) + " |"
    assert printed.out.splitlines()[2] == "| " + " | ".join(row.line()) + " |"
    assert json.loads(file.read_text())["rows"][0]["derived"]["share"] == pytest.approx(
        row.share, abs=1e-4
    )


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        __main__.main(["--case", "no such kernel"])
    assert stop.value.code == 2
    assert WATCHED[0].name in capsys.readouterr().err
