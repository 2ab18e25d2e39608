"""The README's table and picture from a protocol report.

`python -m benchmarks.results_page` takes them from here as soon as FILE has all rows of the README.
"""

from __future__ import annotations

import pathlib
import textwrap

from benchmarks import llama_8b
from benchmarks.front_picture import Point
from benchmarks.markdown import table, with_interval
from benchmarks.protocol.caches import README
from benchmarks.protocol.report import CONTEXT, ProtocolReport
from benchmarks.report_file import RESULTS
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_tools.evaluation.protocol import DECODED_FROM, RECENT, SINK

FILE = RESULTS / "protocol_smollm2.json"
LENGTH = 2048
HEAD = (
    "cache",
    "resident bits",
    *(f"resident GiB, batch {batch}" for batch in COMPARED_BATCHES),
    "KL, decoded",
    "KL, after a prompt",
    "same top token, decoded",
)


def report_for_readme(file: pathlib.Path = FILE) -> ProtocolReport | None:
    """Return the report if it has every row of the README's table, else None."""
    if not file.exists():
        return None
    report = ProtocolReport.read(file)
    keys = {row.key for row in report.rows}
    wanted = {(c, False, LENGTH, reading) for c in README for reading in ("prompt", "decoded")}
    return report if wanted <= keys else None


def section(report: ProtocolReport, results: str) -> str:
    """Render the table, the smallest cache first, and the paragraph below it. `results` leads from
    the page to benchmarks/results."""
    rows = sorted(
        (report.row(cache, LENGTH, "decoded") for cache in README),
        key=lambda row: row.sizes_8b()[0].resident,
    )
    lines = (
        (
            f"`{row.cache}`{'*' if row.calibrated else ''}",
            f"{row.sizes_8b()[0].resident_bits:.2f}",
            *(f"{size.resident / 2**30:.2f}" for size in row.sizes_8b()),
            with_interval(*report.kl(row), "#.2g"),
            with_interval(*report.kl(report.row(row.cache, LENGTH, "prompt")), "#.2g"),
            f"{row.measured.agreement(report.headline):.1%}",
        )
        for row in rows
    )
    note = textwrap.fill(
        _note(report, results), 100, break_long_words=False, break_on_hyphens=False
    )
    return f"{table(HEAD, lines)}\n\n{note}"


def points(report: ProtocolReport) -> list[Point]:
    """Return every cache with the protocol's windows that was decoded, the smallest first."""
    rows = (r for r in report.rows if (r.context, r.reading) == (LENGTH, "decoded"))
    decoded = [
        Point(row.cache, row.sizes_8b()[0].resident / 2**30, *report.kl(row))
        for row in rows
        if not row.own_windows
    ]
    return sorted(decoded, key=lambda point: point.gib)


def _note(report: ProtocolReport, results: str) -> str:
    outside = [
        text.domain
        for text in report.texts
        if report.calibration_text is None or text.domain != report.calibration_text.domain
    ]
    share = report.row(README[0], LENGTH, "decoded").exact_share
    learned = (
        f" Rows with * learned from {report.calibration_text.name}, another domain."
        if report.calibration_text
        else ""
    )
    return (
        f"Bits and GiB are resident, for 1 and 16 sequences of {CONTEXT // 1024}K tokens of"
        f" {llama_8b.NAME}: the cache, what its method adds to the model, and the working memory of"
        f" a step. KL to full precision is that of {report.model} on {' and '.join(outside)}, with"
        f" 95 % t intervals over {len(report.headline)} windows. Every cache keeps the first {SINK}"
        f" and the newest {RECENT} tokens exact, {share:.1%} of what a scored token reads. Decoded:"
        f" all tokens from {DECODED_FROM} on go through the cache one by one; after a prompt:"
        f" {LENGTH} tokens are read exactly first.{learned} All rows:"
        f" [the protocol]({results}{FILE.stem}.md)."
    )
