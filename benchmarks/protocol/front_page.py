"""The README's table and picture from a protocol report.

`python -m benchmarks.results_page` takes them from here as soon as FILE has all rows of the README.
"""

from __future__ import annotations

import pathlib
import statistics
import textwrap

from benchmarks import front_picture, llama_8b
from benchmarks.front_picture import Point
from benchmarks.markdown import table, with_interval
from benchmarks.protocol.caches import README
from benchmarks.protocol.large_models import CONTEXT
from benchmarks.protocol.report import ProtocolReport
from benchmarks.report_file import RESULTS
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_tools.evaluation.protocol import (
    BLOCKS,
    DECODED_FROM,
    READINGS,
    RECENT,
    SINK,
    WORDS,
    Reading,
)

FILE = RESULTS / "protocol_smollm2.json"
OTHER_FILE = RESULTS / "protocol_gemma3.json"  # of another model
SOURCES = FILE, OTHER_FILE
PAGE = pathlib.Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- made by python -m benchmarks.results_page -->"
LENGTH = 2048
HEAD = ("cache", "resident bits", *(f"resident GiB, batch {batch}" for batch in COMPARED_BATCHES))
A_TEXT = {"encyclopedia": "an encyclopedia", "novel": "a novel"}
COLUMNS = {"decoded": "KL, decoded", "prompt": "KL, after a prompt"}


def report_for_readme(file: pathlib.Path = FILE) -> ProtocolReport | None:
    """Return the report if all caches of the README were measured in one of its readings."""
    if not file.exists():
        return None
    report = ProtocolReport.read(file)
    return report if readings(report) else None


def other_report(file: pathlib.Path = OTHER_FILE) -> ProtocolReport | None:
    """Return the other model's report, or None without its file."""
    return ProtocolReport.read(file) if file.is_file() else None


def readings(report: ProtocolReport) -> list[Reading]:
    """Return the readings of which the report has every cache of the README, the harder first."""
    keys = {row.key for row in report.rows}
    return [
        reading
        for reading in reversed(READINGS)
        if all((cache, False, LENGTH, reading) in keys for cache in README)
    ]


def section(report: ProtocolReport, results: str, other: ProtocolReport | None = None) -> str:
    """Render the table, the smallest cache first, and the paragraph below it.

    Args:
        report: the rows of the table.
        results: leads from the page to benchmarks/results.
        other: rows of another model, for one more column.
    """
    shown = readings(report)
    beside = () if other is None else (_column_of(other),)
    rows = report.by_size(report.row(cache, LENGTH, shown[0]) for cache in README)
    lines = (
        (
            report.marked(row),
            f"{report.large(row)[0].resident_bits:.2f}",
            *(f"{size.resident / 2**30:.2f}" for size in report.large(row)),
            *(
                with_interval(*report.kl(report.row(row.cache, LENGTH, reading)), "#.2g")
                for reading in shown
            ),
            f"{row.measured.agreement(report.headline):.1%}",
            *(column.get(row.cache, "") for _, column in beside),
        )
        for row in rows
    )
    titles = (title for title, _ in beside)
    agreement = f"same top token, {COLUMNS[shown[0]].removeprefix('KL, ')}"
    head = (*HEAD, *(COLUMNS[reading] for reading in shown), agreement, *titles)
    note = textwrap.fill(
        _note(report, results, other), 100, break_long_words=False, break_on_hyphens=False
    )
    return f"{table(head, lines)}\n\n{note}"


def _column_of(report: ProtocolReport) -> tuple[str, dict[str, str]]:
    """Return the title of another model's column, and the KL of each cache in the reading that has
    most of them."""
    reading = most_measured(report)
    rows = report.quantized(LENGTH, reading)
    kl = {
        row.cache: f"{with_interval(*report.kl(row), '#.2g')}{report.remark(row)}" for row in rows
    }
    return f"{report.model}: {COLUMNS[reading]}", kl


def picture_of(file: pathlib.Path) -> pathlib.Path:
    """Return the path of a report's picture: the README's, or one beside the file."""
    return front_picture.FILE if file == FILE else file.with_suffix(".svg")


def picture(report: ProtocolReport) -> str:
    """Render a picture of the reading that has most caches."""
    reading = most_measured(report)
    subject = f"{report.model} on {_texts(report)}, {WORDS[reading]}"
    windows, sample = len(report.headline), f"{len(report.outside)} texts"
    return front_picture.picture(points(report, reading), subject, windows, sample)


def most_measured(report: ProtocolReport) -> Reading:
    """Return the reading that has most caches, the harder of equals."""
    return max(reversed(READINGS), key=lambda reading: len(points(report, reading)))


def points(report: ProtocolReport, reading: Reading) -> list[Point]:
    """Return every cache with the protocol's windows in one reading, the smallest first, without
    plans, which have no size for the large model."""
    measured = [
        Point(row.cache, report.large(row)[0].resident / 2**30, *report.kl(row))
        for row in report.quantized(LENGTH, reading)
        if not row.of_layers
    ]
    return sorted(measured, key=lambda point: point.gib)


def _texts(report: ProtocolReport) -> str:
    return " and ".join(A_TEXT.get(text.domain, text.domain) for text in report.outside)


def _share_of(other: ProtocolReport | None) -> str:
    """Say what share of tokens is exact in another model, whose windowed layers read fewer."""
    if other is None:
        return ""
    rows = other.quantized(LENGTH, most_measured(other))
    share = statistics.median(row.exact_share for row in rows)
    return f" ({share:.1%} in `{other.model}`, most of whose layers use sliding windows)"


def _note(report: ProtocolReport, results: str, other: ProtocolReport | None) -> str:
    shown = readings(report)
    share = report.row(README[0], LENGTH, shown[0]).exact_share
    learned = (
        f" Rows with * were calibrated on {report.calibration_text.name}, another domain."
        if report.calibration_text
        else ""
    )
    if any(report.of_another_processor(report.row(cache, LENGTH, shown[0])) for cache in README):
        learned += " † marks a number measured on another processor than most."
    read = {
        "decoded": (
            f" Decoded: all tokens from {DECODED_FROM} on go through the cache one by one, so that"
            " errors add up as they do in use."
        ),
        "prompt": (
            f" After a prompt: {LENGTH} tokens are read exactly and quantized, then {report.scored}"
            " are decoded."
        ),
    }
    readings_said = "".join(read[reading] for reading in shown)
    measured = ((report, FILE), *([(other, OTHER_FILE)] if other else []))
    pages = (f"[`{model.model}`]({results}{file.stem}.md)" for model, file in measured)
    return (
        f"Bits and GiB are resident, for 1 and 16 sequences of {CONTEXT // 1024}K tokens of"
        f" {llama_8b.NAME}: the cache, what its method adds to the model, and the working memory"
        f" of a step. KL to full precision was measured on `{report.model}`, on {_texts(report)},"
        f" with 95 % intervals over {len(report.headline)} pieces of text, with"
        f" `,sink={SINK},recent={RECENT}` in every spec: the first {SINK} tokens and the newest"
        f" {RECENT} stay exact, and up to {BLOCKS[0] - 1} more until they are quantized as a block,"
        f" {share:.1%} of what a scored token reads{_share_of(other)}.{readings_said}"
        f"{learned} All rows: {', '.join(pages)}; [at equal bytes]({results}equal_bytes.md)."
    )
