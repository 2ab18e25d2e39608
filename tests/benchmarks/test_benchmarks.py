"""Committed pages are those of committed results, of clean commits and of commands that exist."""

from __future__ import annotations

import importlib.util
import json
import re

import kvq_jax as kvq
from benchmarks import results_page
from benchmarks.machine_code.report import Instructions, named_by_spec
from benchmarks.report_file import RESULTS, clean

TO_BE_MEASURED_AGAIN = {  # of a dirty tree; a name goes when its page is of a clean commit
    "attention_waterfill_cpu",
    "launches_jax_0_12",
}


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
