"""The benchmarks run, their rows say what was measured, and the tables are made from them."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import pytest

import kvq_jax as kvq
from benchmarks import results_page
from benchmarks.cpu import attention, decode_step
from benchmarks.cpu.timing import CpuReport
from benchmarks.machine_code.report import Instructions, named_by_spec
from benchmarks.report_file import RESULTS, clean
from kvq_jax.attention import dispatch

TO_BE_MEASURED_AGAIN = {  # of a dirty tree; a name goes when its page is of a clean commit
    "attention_waterfill_cpu",
    "launches_jax_0_12",
}
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
        assert len(row.samples_ms) == 3, row.implementation
        assert row.best_ms <= row.median_ms, row.implementation
        assert row.error < (1e-2 if row.dtype == "bfloat16" else 1e-4), (
            f"{row.implementation}: {row.error=}"
        )
        assert row.peak_bytes > row.cache_bytes > 0, row.implementation
    sizes = {row.implementation: row.cache_bytes for row in report.rows}
    assert sizes["kivi:bits=4"] < sizes[implementations[0]]


def test_committed_pages_are_those_of_the_committed_results():
    committed = {file.name: file.read_text(encoding="utf-8") for file in RESULTS.glob("*.md")}
    made = results_page.render(RESULTS)
    assert set(committed) == set(made), (
        "a page without its JSON, or a JSON without its page: run `python -m"
        " benchmarks.results_page`"
    )
    for name, text in made.items():
        assert committed[name] == text, f"{name}: run `python -m benchmarks.results_page`"


def test_the_commands_of_the_committed_results_exist():
    for file in RESULTS.glob("*.json"):
        module = json.loads(file.read_text(encoding="utf-8"))["command"].split()[2]
        assert importlib.util.find_spec(module), f"{file.name}: {module}"


def test_every_committed_page_names_a_clean_commit():
    commits = {
        file.stem: json.loads(file.read_text(encoding="utf-8")).get("commit", "")
        for file in RESULTS.glob("*.json")
    }
    unclean = {stem for stem, commit in commits.items() if not clean(commit)}
    assert unclean == TO_BE_MEASURED_AGAIN, (
        "measure pages of a clean commit, and take those that are from TO_BE_MEASURED_AGAIN"
    )


def test_specs_that_name_kernels_store_the_bits_of_their_rows():
    rows = Instructions.read(RESULTS / "instructions.json").rows
    named = [(row, re.match(r"`(\S+)`, H (\d+)", named_by_spec(row.name))) for row in rows]
    specs = {(spec[1], int(spec[2]), row.stored_bits) for row, spec in named if spec}
    assert {name for name, *_ in specs} > {
        "innerq:bits=2",
        "innerq:bits=1,mode=sym",
        "kivi:bits=4,pre_rope=true",
    }
    for spec, head_dim, bits in specs:
        assert (
            kvq.size.body_bits_per_element(
                f"{spec},block=32", kvq.CacheDims(1, 8, 8, head_dim, 512)
            )
            == bits
        ), spec


def test_links_of_the_pages_lead_somewhere():
    for name, text in results_page.render(RESULTS).items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert (RESULTS / target).exists(), f"{name}: {target}"
