"""Every interval that a document prints stands on a result page that the document links."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from decimal import Decimal

import pytest

from benchmarks import claims
from benchmarks.markdown import with_interval
from kvq_tools.evaluation.intervals import paired_ratio

ROOT = claims.ROOT
PAPERS = ROOT / "docs" / "papers.md"
DOCUMENTS = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "kvq_jax" / "methods").glob("*/README.md")),
)
RESULTS = ROOT / "benchmarks" / "results", ROOT / "laboratory" / "results"
SUBSPACE = RESULTS[1] / "squat_subspace_smollm2.md"
NUMBER = r"([-+]?\d[\d.]*)"
INTERVAL = re.compile(rf"{NUMBER}(?: %)? \[{NUMBER}, {NUMBER}\]")

Numbers = tuple[str, ...]  # a mean and its limits as printed


def intervals(text: str) -> Iterator[tuple[str, Numbers]]:
    """Yield the intervals of a text without its bold type, and their numbers."""
    for found in INTERVAL.finditer(" ".join(text.replace("**", "").split())):
        yield found[0], found.groups()


@functools.cache
def printed(page: pathlib.Path) -> set[Numbers]:
    text = page.read_text(encoding="utf-8") + (f" {worst_layer()}" if page == SUBSPACE else "")
    return {numbers for _, numbers in intervals(text)}


def worst_layer() -> str:
    """Return SQuat's error over KIVI's in the layer that loses most at lam 1e-2 and rank 5, which
    a page that no generator makes leaves out."""
    stored = json.loads(SUBSPACE.with_suffix(".json").read_text(encoding="utf-8"))
    errors = {
        (error["rank"], error["lam"], error["layer"]): error["windows"]
        for error in stored["errors"]
        if error["setting"] == "squat"
    }
    layers = {layer for _, _, layer in errors}
    ratios = (paired_ratio(errors[5, 0.01, at], errors[None, None, at]) for at in layers)
    return with_interval(*max(ratios), ".2f")


def rounds_to(exact: str, short: str) -> bool:
    """Return True if the first number, rounded to the digits of the second, is the second. Half
    rounds either way, for a page's own digits are rounded."""
    digits, more = (len(number.partition(".")[2]) for number in (short, exact))
    distance = abs(Decimal(exact) - Decimal(short))
    if more <= digits:
        return more == digits and distance == 0
    return 2 * distance <= Decimal(10) ** -digits


def result_pages(document: pathlib.Path, links: tuple[str, ...]) -> set[pathlib.Path]:
    """Return the pages of results among links, without the one that repeats what documents say."""
    pages = {(document.parent / link).resolve() for link in links if link.endswith(".md")}
    return {page for page in pages if page.parent in RESULTS and page != claims.FILE}


def missing(document: pathlib.Path, text: str) -> list[str]:
    """Return the intervals of a document that no page prints which it links. Those of the papers'
    findings have to stand on the pages of their own line or, if it links none, of the last before
    it."""
    parts = list(claims.linked(text))
    every = tuple(itertools.chain.from_iterable(links for _, links in parts))
    absent = []
    for part, links in parts:
        found = list(intervals(part))
        pages = result_pages(document, links if document == PAPERS else every) if found else ()
        on_pages = [numbers for page in pages for numbers in printed(page)]
        absent += [
            interval
            for interval, numbers in found
            if not any(all(map(rounds_to, page, numbers)) for page in on_pages)
        ]
    return absent


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_interval_of_a_document_stands_on_a_page_that_it_links(document: pathlib.Path):
    assert not missing(document, document.read_text(encoding="utf-8")), (
        "correct the interval, link its page, or print it there (laboratory/quality/ratios.py)"
    )


def test_documents_print_many_intervals():
    count = {path: len(list(intervals(path.read_text(encoding="utf-8")))) for path in DOCUMENTS}
    assert count[PAPERS] > 150
    assert count[ROOT / "kvq_jax/methods/waterfill/README.md"] > 50
    assert sum(count.values()) > 400
    assert sum(found > 0 for found in count.values()) >= 11


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("0.66 [0.63, 0.70]", "0.67 [0.63, 0.70]"),  # of pairs
        ("0.59 [0.47, 0.74]", "0.59 [0.48, 0.74]"),  # of a table of ratios
        ("0.086 [0.074, 0.101]", "0.086 [0.074, 0.100]"),  # rounded from five digits
        ("0.086 [0.074, 0.101]", "0.0858 [0.0735, 0.1005]"),  # the fourth is wrong
        ("-46 [-69, -9]", "46 [9, 69]"),  # of the other sign
        ("1.29 [1.25, 1.34]", "1.30 [1.25, 1.34]"),  # recomputed
        ("0.97 [0.83, 1.14]", "0.97 [0.93, 1.01]"),  # of another line's page
    ],
)
def test_a_wrong_digit_is_found(said: str, wrong: str):
    text = PAPERS.read_text(encoding="utf-8")
    assert said in text
    assert missing(PAPERS, text.replace(said, wrong)) == [wrong] * text.count(said)


def test_rounding_drops_digits_alone():
    assert rounds_to("0.08587", "0.086")
    assert rounds_to("2.05", "2.0"), "2.046 would be printed so"
    assert not rounds_to("0.086", "0.0860"), "a digit that the page has not"
    assert not rounds_to("0.08587", "0.085")
