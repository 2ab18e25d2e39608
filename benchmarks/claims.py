"""Make benchmarks/results/claims.md: every comparative sentence of the README, of the papers' and
the protocol's pages and of our own method's, with the intervals behind it.

A sentence's intervals are those in it, or on the line of its table or in its paragraph, which link
the pages that they come from. `python -m benchmarks.results_page` writes the file.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.markdown import table

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "results" / "claims.md"
PAGES = (
    "README.md",
    "docs/papers.md",
    "docs/evaluation.md",
    "kvq_jax/methods/waterfill/README.md",
)
COMPARES = re.compile(
    r"\b(ahead|behind|of dense's|as long as|told apart|than|times|beats?|better|worse|lower|higher"
    r"|smaller|larger|faster|slower|holds|level with|helps|as good as)\b",
    re.IGNORECASE,
)
INTERVAL = re.compile(r"[-+]?\d[\d.]*(?: %)? \[[^\]\n]*\d[^\]\n]*\]")
LINK = re.compile(r"\]\(([^)\s#]+\.(?:md|json))(?:#[^)\s]*)?\)")
# what compares nothing, by its beginning
NO_COMPARISON = (
    "A KV cache outgrows its model",  # methods "behind one interface"
    "Brackets are 95 % intervals",  # the notation
    "A verdict is given only if",
    "The shorter the window of tokens",
)
HEAD = "page", "sentence", "intervals", "from"
SHOWN = 3  # intervals of a sentence; the page has the others


class Claim(NamedTuple):
    """A comparative sentence, its intervals or, if it has none, its paragraph's, and the pages that
    the paragraph links."""

    page: str
    sentence: str
    intervals: tuple[str, ...]
    sources: tuple[str, ...]


def claims(page: str, text: str) -> Iterator[Claim]:
    """Yield the sentences of a page that compare or have an interval, in its order. Code and
    headings have none, and of tables those lines alone that compare in words."""
    for paragraph, sources in linked(text):
        intervals = INTERVAL.findall(paragraph)
        for sentence in _sentences(paragraph):
            given = INTERVAL.findall(sentence)
            compares = COMPARES.search(sentence) or (given and not paragraph.startswith("|"))
            if compares and not sentence.startswith(NO_COMPARISON):
                nearest = given or intervals
                yield Claim(page, sentence, tuple(nearest), sources)


def linked(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield paragraphs, items of lists and lines of tables, each with the pages that it links. If
    it links none, they are those of the last part that links any, such as a list's introduction."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    section: tuple[str, ...] = ()
    for paragraph in _paragraphs(text):
        section = tuple(dict.fromkeys(LINK.findall(paragraph))) or section
        yield paragraph, section


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and lines of tables, each on one line."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if lines and lines[0].startswith("#"):
            continue
        for part in re.split(r"\n(?=[-|])", block):
            yield " ".join(part.split())


def _sentences(paragraph: str) -> list[str]:
    if paragraph.startswith("|"):
        cells = [cell.strip() for cell in paragraph.strip("|").split("|")]
        return [": ".join(cells[:3])] if len(cells) > 2 else []
    return re.split(r"(?<=[.:!?]) (?=[A-Z`*])", paragraph.removeprefix("- "))


def all_claims() -> list[Claim]:
    """Return the comparative sentences of all pages."""
    return [
        claim for page in PAGES for claim in claims(page, (ROOT / page).read_text(encoding="utf-8"))
    ]


def contents() -> str:
    """Render the file."""
    lines = (
        (
            claim.page,
            _plain(claim.sentence),
            "; ".join(claim.intervals[:SHOWN]) + (" ..." if len(claim.intervals) > SHOWN else ""),
            ", ".join(pathlib.Path(source).name for source in claim.sources),
        )
        for claim in all_claims()
    )
    return (
        "# Comparative sentences and their intervals\n\nMade by `python -m benchmarks.results_page`"
        f" from {', '.join(PAGES)}: every sentence that compares, the 95 % intervals in it (or in"
        " its line or paragraph), and the pages that these come from.\n\n"
        f"{table(HEAD, lines)}\n"
    )


def _plain(sentence: str) -> str:
    """Return a sentence without links, for a cell of a table."""
    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", sentence).replace("|", "/")
