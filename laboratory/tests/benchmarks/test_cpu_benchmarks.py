"""The benchmarks for CPUs run, and their rows say what was measured."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.cpu import attention, decode_step
from benchmarks.cpu.timing import CpuReport
from kvq_jax.attention import dispatch

CACHES = ("kivi:bits=4", "innerq")
NATIVE = dispatch.no_device("native") is None
ATTENDED = (*CACHES, "waterfill")  # which is calibrated
READ = (
    tuple(name for spec in ATTENDED for name in (spec, f"{spec}, xla")) if NATIVE else ATTENDED
)  # what kernels read is timed on XLA, too


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("results")
    small = ["--quick", "--head-dim", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TOKENS", 512)  # two layers in a program, and not 32
        attention.main(
            [
                *small,
                "--cache",
                *ATTENDED,
                "--kv-heads",
                "2",
                "--group",
                "2",
                "--json",
                str(folder / "attention.json"),
            ]
        )
    decode_step.main(
        [*small, "--cache", *CACHES, "--layers", "1", "--json", str(folder / "decode_step.json")]
    )
    return folder


@pytest.mark.parametrize(
    ("name", "implementations"),
    [
        (
            "attention",
            ("one dot, float32", "one dot, query first, float32", "one dot, bfloat16", *READ),
        ),
        ("decode_step", ("dense", *CACHES)),
    ],
)
def test_a_report_has_a_row_for_each_implementation(
    results: pathlib.Path, name: str, implementations: tuple[str, ...]
):
    report = CpuReport.read(results / f"{name}.json")
    assert tuple(row.implementation for row in report.rows) == implementations
    assert report.baseline == implementations[0]
    assert report.rows[0].ratio == 1.0
    for row in report.rows:
        assert len(row.samples_ms) == (32 if report.grows else 3), row.implementation
        assert row.best_ms <= report.step_ms(row), row.implementation
        assert row.error < (1e-2 if row.dtype == "bfloat16" else 1e-4), (
            f"{row.implementation}: {row.error=}"
        )
        assert row.peak_bytes > row.cache_bytes > 0, row.implementation
    sizes = {row.implementation: row.cache_bytes for row in report.rows}
    assert sizes["kivi:bits=4"] < sizes[implementations[0]]
