"""The page of a protocol report: a table for each length and reading, and a verdict below it."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator

import kvq_jax as kvq
from benchmarks.markdown import bracket, head, table, with_interval
from benchmarks.protocol import caches, made_plans
from benchmarks.protocol.large_models import CONTEXT
from benchmarks.protocol.report import ProtocolReport, Row
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_tools.evaluation.protocol import (
    DECODED_FROM,
    MAX_EXACT,
    READINGS,
    RECENT,
    SINK,
    WORDS,
    choice,
)
from kvq_tools.report.verdict import MIN_KL, sentence


def page(report: ProtocolReport, file: pathlib.Path) -> str:
    """Render the page."""
    parts = head(report, file, *_said(report))
    by_table = itertools.groupby(
        sorted(report.rows, key=lambda row: (row.context, row.reading != "prompt")),
        lambda row: (row.context, row.reading),
    )
    for (context, reading), rows in by_table:
        chosen = sorted(report.by_size(rows), key=lambda row: row.own_windows)
        parts += [f"## {context} tokens, {WORDS[reading]}", _table(report, chosen)]
        alike = [row for row in chosen if not (row.own_windows or row.of_layers)]
        equal = [row for row in alike if not report.keeps_more(row)]
        if len(equal) > 1:
            parts.append(verdict(report, equal))
    decoded = _decoded_over_prompt(report)
    if decoded:
        parts += [
            "## What decoding adds",
            "KL of the same tokens when everything is decoded, over the KL after an exact prompt.",
            table(("cache", "context", "ratio"), decoded),
        ]
    if report.elsewhere:
        parts += [
            "## On another processor",
            "KL of rows above, measured again on another kind of processor, over their KL.",
            table(("cache", "context", "reading", "processor", "ratio"), _elsewhere(report)),
        ]
    if missing := "\n".join(_not_measured(report)):
        parts += ["## Caches of the protocol's list that were not measured", missing]
    return "\n\n".join(parts)


def verdict(report: ProtocolReport, rows: list[Row]) -> str:
    """Return the sentence of `kvq report` for caches with equal windows."""
    return sentence(
        [
            choice(
                f"`{row.cache}`",
                kvq.parse(row.spec),
                report.large(row)[0].resident_bits,
                row.measured,
                report.headline,
                row.exact_share,
            )
            for row in rows
        ]
    )


def _said(report: ProtocolReport) -> list[str]:
    texts = ", ".join(f"{text.name} ({text.domain})" for text in report.texts)
    said = [
        f"Model: {report.model}, float32. {report.windows} windows each of {texts}; the last"
        f" {report.scored} tokens of a window are scored, the same in both readings.",
        f"The first {SINK} and the newest {RECENT} tokens are exact in every row but those with the"
        " paper's windows, and more in those marked ‡, whose blocks are longer; `exact` is the mean"
        f" share of exact tokens among those that a scored one reads, with ! above {MAX_EXACT:.0%}."
        " No verdict compares rows marked ‡.",
        f"`decoded` prefills {DECODED_FROM} tokens and decodes all others.",
        "KL in nats per token: mean with a 95 % interval over windows (modified Cox, widened by the"
        " rounding that other batches and steps show), median, 99.9th percentile, all over the"
        " windows outside the calibration's domain.",
        f"Bits and GiB are resident, for {report.large_model} at {CONTEXT // 1024}K tokens. Bytes"
        f" are what a cache takes at commit {report.commit}; KL was measured at those named below.",
    ]
    if report.calibration_text:
        said.append(
            f"Rows marked * learned from {report.calibration_text.name}"
            f" ({report.calibration_text.domain})."
        )
    named = {row.processor or "unknown" for row in report.rows if report.of_another_processor(row)}
    if others := sorted(named):
        said.append(f"Rows marked † were measured on another processor: {', '.join(others)}.")
    if unnamed := sum(not row.processor for row in report.rows):
        said.append(f"{unnamed} of {len(report.rows)} rows do not name their processor.")
    if any(row.of_layers for row in report.rows):
        said.append(
            "`plan=B` stands for the widths that `kvq plan` chose for B stored bits, from the text"
            f" that other rows were calibrated on ([{made_plans.FILE.name}]"
            f"(../protocol/{made_plans.FILE.name})): widths of the layers of {report.model}, which"
            f" have no size for {report.large_model}."
        )
    said.append("Runs chose rows by --caches, --contexts and --readings.")
    commits = sorted({row.commit for row in report.rows})
    said.append(f"Code: {', '.join(commits)}.")
    return said


def _not_measured(report: ProtocolReport) -> Iterator[str]:
    """Yield, for each length and reading, the caches of the protocol's list without a row. A
    command that names its caches has no others."""
    if "--caches" in report.command:
        return
    for context, reading in itertools.product(
        sorted({row.context for row in report.rows}), READINGS
    ):
        lacking = [
            f"`{cache}`{' in its own windows' * own_windows}"
            for cache, own_windows in caches.listed(context, reading)
            if report.find(cache, context, reading, own_windows) is None
        ]
        if lacking:
            yield f"- {context} tokens, {WORDS[reading]}: {', '.join(lacking)}."


def _table(report: ProtocolReport, rows: list[Row]) -> str:
    domains = report.domains
    columns = (
        "cache",
        "bits",
        *(f"GiB, batch {batch}" for batch in COMPARED_BATCHES),
        f"MiB, {report.model}",
        "exact",
        "KL",
        "median",
        "99.9 %",
        *(f"KL, {domain}" for domain in domains),
        "same top token",
        "perplexity",
        "rounding",
        "seconds",
    )
    lines = ((*cells(report, row), f"{row.seconds:.0f}") for row in rows)
    return table(columns, lines)


def cells(report: ProtocolReport, row: Row) -> tuple[str, ...]:
    """Return the printed cells of a row, without its time."""
    measured, outside = row.measured, report.headline
    perplexity = measured.perplexity(outside)
    return (
        f"{report.marked(row)}{_own(row)}",
        *_large_cells(report, row),
        f"{row.model_bytes / 2**20:.1f}",
        f"{row.exact_share:.1%}{'!' if row.exact_share > MAX_EXACT and _lossy(row) else ''}",
        with_interval(*report.kl(row), "#.3g"),
        f"{measured.median:#.2g}",
        f"{measured.p999:#.2g}",
        *(with_interval(*measured.kl(windows), "#.2g") for windows in report.domains.values()),
        f"{measured.agreement(outside):.1%}",
        f"{perplexity.value:.2f}{bracket(perplexity.interval, '.2f')}",
        f"{measured.rounding:.1%}" if _lossy(row) else "",
    )


def _large_cells(report: ProtocolReport, row: Row) -> tuple[str, ...]:
    if row.of_layers:
        return ("",) * (1 + len(COMPARED_BATCHES))
    sizes = report.large(row)
    return f"{sizes[0].resident_bits:.2f}", *(f"{size.resident / 2**30:.2f}" for size in sizes)


def _own(row: Row) -> str:
    if not row.own_windows:
        return ""
    spec = kvq.parse(row.spec)
    return f" with its paper's windows ({spec.sink} + {spec.recent}, blocks of {spec.block})"


def _lossy(row: Row) -> bool:
    return min(row.measured.window_kl) > MIN_KL


def _decoded_over_prompt(report: ProtocolReport) -> list[tuple[str, ...]]:
    lines = []
    for row in report.rows:
        prompt = report.find(row.cache, row.context, "prompt")
        if row.reading == "decoded" and prompt:
            ratio = with_interval(*report.ratio(row, prompt), ".2f")
            lines.append((f"`{row.cache}`", f"{row.context}", ratio))
    return lines


def _elsewhere(report: ProtocolReport) -> list[tuple[str, ...]]:
    lines = []
    for row in report.elsewhere:
        here = report.row(row.cache, row.context, row.reading, row.own_windows)
        ratio = report.ratio(row, here)
        cells = f"`{row.cache}`", f"{row.context}", row.reading, row.processor
        lines.append((*cells, with_interval(*ratio, ".3f")))
    return lines
