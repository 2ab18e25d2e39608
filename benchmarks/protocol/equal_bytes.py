"""Make benchmarks/results/equal_bytes.md: waterfill against every other cache of the protocol, at
no more bytes than the other has.

Budgets would flatter whichever method has a cache just below them. So each other cache is a budget
of its own: of the waterfill caches that are no larger, the one with the least KL is compared with
it, window by window. `python -m benchmarks.results_page` writes the file.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import llama_8b
from benchmarks.markdown import table, with_interval
from benchmarks.protocol import front_page
from benchmarks.protocol.front_page import LENGTH, SOURCES
from benchmarks.protocol.large_models import CONTEXT
from benchmarks.protocol.report import ProtocolReport, Row
from benchmarks.report_file import RESULTS
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_tools.evaluation.intervals import Estimate
from kvq_tools.evaluation.protocol import READINGS, WORDS

FILE = RESULTS / "equal_bytes.md"
OURS = "waterfill"
GOAL = 1.5  # times less KL
HEAD = (
    "cache",
    "bits",
    "KL",
    f"`{OURS}` of no more bytes",
    "bits",
    "KL",
    f"KL of `{OURS}` over the cache's",
    "",
)
INTRODUCTION = f"""\
# Waterfill at no more bytes than each other cache

Made by `python -m benchmarks.results_page` from the rows of the protocol. For each other cache that
was measured, the `{OURS}` cache with the least KL among those that are no larger, compared on the
same windows, which are of other domains than the calibration's. Rows with * learned from a text,
rows with † were measured on another processor than most, and rows with ‡ keep more tokens exact
than most, because their blocks are longer. Brackets are 95 % intervals, t, of the logs of the
ratios over the windows of all texts, widened by rounding: a `{OURS}` cache is ahead if its interval
ends below 1, by more than {GOAL:g} times if it ends below {1 / GOAL:.2f}. Bits are resident, for
{{batch}} of {CONTEXT // 1024}K tokens of {llama_8b.NAME}. In the small model, and at the contexts
at which KL was measured, parameters take a larger share, and those of `{OURS}` are the largest
(column MiB of the protocol's pages): the last line below a table counts by these bytes, with the
caches of `kvq plan`, whose widths are of that model's layers alone."""


def compared(
    report: ProtocolReport, reading: str, batch: int | None, context: int = LENGTH
) -> Iterator[tuple[Row, Row | None, Estimate | None]]:
    """Yield each other cache, the smallest first, the waterfill cache beside it, and the ratio of
    their KL; None without a waterfill cache that is no larger.

    Args:
        reading: of the protocol.
        batch: index of the batch whose bytes are compared, in COMPARED_BATCHES, or None for the
            bytes of one sequence of the measured model.
        context: tokens before those that are scored.
    """

    def size(row: Row) -> int:
        return row.model_bytes if batch is None else report.large(row)[batch].resident

    measured = report.quantized(context, reading)
    rows = sorted((row for row in measured if batch is None or not row.of_layers), key=size)
    ours = [row for row in rows if _ours(row)]
    for row in rows:
        if _ours(row):
            continue
        no_larger = [one for one in ours if size(one) <= size(row)]
        if not no_larger:
            yield row, None, None
            continue
        best = min(no_larger, key=lambda one: report.kl(one).value)
        yield row, best, report.ratio(best, row)


def verdict(ratio: Estimate | None) -> str:
    """Return what the interval of a ratio of KL tells."""
    if ratio is None:
        return "none as small"
    low, high = ratio.interval
    if high < 1 / GOAL:
        return f"ahead by more than {GOAL:g} times"
    if high < 1:
        return "ahead"
    return "behind" if low > 1 else "not told apart"


def contents(files: Sequence[pathlib.Path] = SOURCES) -> str:
    """Render the page from the reports that are there."""
    parts = [INTRODUCTION.format(batch=_sequences(COMPARED_BATCHES[0]))]
    for file in files:
        if not file.is_file():
            continue
        report = ProtocolReport.read(file)
        parts.append(f"![KL over resident bytes, {report.model}]({_picture(file)})")
        contexts = sorted({row.context for row in report.rows} | {LENGTH}, key=_distance)
        for context, reading in itertools.product(contexts, READINGS):
            if any(best for _, best, _ in compared(report, reading, 0, context)):
                of_context = "" if context == LENGTH else f", {context} tokens"
                parts += [
                    f"## {report.model}, {WORDS[reading]}{of_context}",
                    f"[All numbers]({file.stem}.md).",
                    table(HEAD, _lines(report, reading, context)),
                    _counted(report, reading, context),
                ]
    return "\n\n".join(parts) + "\n"


def _distance(context: int) -> int:
    return abs(context - LENGTH)  # the usual one first


def _lines(report: ProtocolReport, reading: str, context: int) -> Iterator[tuple[str, ...]]:
    for row, best, ratio in compared(report, reading, 0, context):
        beside = (
            ("", "", "", "")
            if best is None or ratio is None
            else (*_cells(report, best), with_interval(*ratio, ".2f"))
        )
        yield (*_cells(report, row), *beside, verdict(ratio))


def _cells(report: ProtocolReport, row: Row) -> tuple[str, str, str]:
    return (
        report.marked(row),
        f"{report.large(row)[0].resident_bits:.2f}",
        f"{report.kl(row).value:#.2g}",
    )


def _counted(report: ProtocolReport, reading: str, context: int) -> str:
    """Say how many comparisons end in which verdict, by the bytes of each batch, and by those of
    the measured model."""
    said = []
    budgets: list[tuple[int | None, str]] = [
        (at, _sequences(batch)) for at, batch in enumerate(COMPARED_BATCHES)
    ]
    budgets.append((None, f"{report.model} at {context:,} tokens"))
    for at, words in budgets:
        pairs = list(compared(report, reading, at, context))
        said.append(f"- By the bytes of {words}: {_counts(ratio for _, _, ratio in pairs)}")
        by_text = [report.ratio_by_text(best, row) for row, best, _ in pairs if best]
        of_texts = [
            f"{text.domain} {_counts(ratios[text.domain] for ratios in by_text)}"
            for text in report.outside
        ]
        said[-1] += f" (on each text alone: {'; '.join(of_texts)})." if by_text else "."
    return "\n".join(said)


def _counts(ratios: Iterable[Estimate | None]) -> str:
    verdicts = [verdict(ratio) for ratio in ratios]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in sorted(set(verdicts)))


def _sequences(batch: int) -> str:
    return "one sequence" if batch == 1 else f"{batch} sequences"


def _picture(file: pathlib.Path) -> str:
    """Return the picture of a report as this page links it."""
    return os.path.relpath(front_page.picture_of(file), FILE.parent)


def _ours(row: Row) -> bool:
    return row.cache.partition(":")[0] == OURS
