"""The pages of the laboratory's results are those of their JSON files."""

from __future__ import annotations

import re

from laboratory.results_page import RESULTS, kept_subject, render


def test_committed_pages_are_those_of_the_committed_results():
    committed = {file.name: file.read_text(encoding="utf-8") for file in RESULTS.glob("*.md")}
    made = render(RESULTS)
    kept = {f"{file.stem}.md" for file in RESULTS.glob("*.json") if kept_subject(file)}
    assert set(committed) == set(made) | kept
    for name, text in made.items():
        assert committed[name] == text, f"{name}: run `python -m laboratory.results_page`"


def test_links_of_the_pages_lead_somewhere():
    for file in RESULTS.glob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
            assert (RESULTS / target).exists(), f"{file.name}: {target}"
