"""Committed pages are those of committed results, of clean commits and of commands that exist."""

import importlib.util
import json
import re

import pytest

import kvq_jax as kvq
from benchmarks import claims, families_table, placements, results_page
from benchmarks.machine_code.report import Instructions, named_by_spec
from benchmarks.report_file import RESULTS, clean, header
from kvq_models.llama.families import FAMILIES
from tests.exhaustive import some

SIZES = [(size,) for size in placements.SIZES]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return results_page.render(RESULTS)


def test_committed_pages_are_those_of_the_committed_results(pages: dict[str, str]):
    committed = {file.name: file.read_text(encoding="utf-8") for file in RESULTS.glob("*.md")}
    assert set(committed) == set(pages), (
        "a page without its JSON, or a JSON without its page: run `python -m"
        " benchmarks.results_page`"
    )
    for name, text in pages.items():
        assert committed[name] == text, f"{name}: run `python -m benchmarks.results_page`"


def test_the_commands_of_the_committed_results_exist_and_name_no_folder_of_a_machine():
    for file in RESULTS.glob("*.json"):
        words = json.loads(file.read_text(encoding="utf-8"))["command"].split()
        assert importlib.util.find_spec(words[2]), f"{file.name}: {words[2]}"
        assert not any(word.startswith("/") for word in words), f"{file.name}: {words}"


def test_an_absolute_path_in_a_command_is_written_by_its_name():
    command = header(("benchmarks.mesh", "--json", "/home/someone/mesh.json"))["command"]
    assert command == "python -m benchmarks.mesh --json mesh.json"


def test_every_committed_page_names_a_clean_commit():
    commits = {
        file.stem: json.loads(file.read_text(encoding="utf-8")).get("commit", "")
        for file in RESULTS.glob("*.json")
    }
    unclean = {stem for stem, commit in commits.items() if not clean(commit)}
    assert not unclean, "measure these pages again, of a clean commit"


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


def test_links_of_the_pages_lead_somewhere(pages: dict[str, str]):
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert (RESULTS / target).exists(), f"{name}: {target}"


def test_the_table_of_families_is_of_today_and_has_every_family():
    page, models = families_table.PAGE.read_text(encoding="utf-8"), families_table.MODELS
    assert families_table.page() == page, "python -m benchmarks.families_table writes it"
    assert {model.model_type for model in models} == set(FAMILIES)
    windowed = {m.model_type for m in models if families_table.config_of(m).sliding_window}
    assert windowed == {"mistral", "olmo3", "gemma2", "gemma3_text", "gpt_oss"}


@pytest.mark.parametrize("size", some(SIZES, SIZES[-1:]), ids=str)
@pytest.mark.parametrize("model", some(tuple(placements.MODELS), ("8B",)))
def test_the_page_of_placements_has_the_rows_that_are_counted(
    model: str, size: tuple[int, str, int]
):
    lines = placements.PAGE.read_text().splitlines()
    shown = [
        line for line in lines if line.startswith(f"| {model} | {size[0]}{size[1]} x {size[2]} |")
    ]
    rows = (placements.row(model, size, cache) for cache in placements.CACHES)
    assert shown == ["| " + " | ".join(row) + " |" for row in rows]
    assert "| " + " | ".join(placements.HEAD) + " |" in lines


def test_every_comparison_holds_an_interval_or_links_the_page_that_has_it():
    every = claims.all_claims()
    assert {claim.page for claim in every} | {"README.md"} == set(claims.PAGES)
    assert [*claims.claims("README.md", "Steps are faster.")], (
        "README's sentences are not looked at"
    )
    assert not [claim for claim in every if not claim.intervals and not claim.sources], (
        "give the interval, or the page that has it, in the sentence or its paragraph"
    )
