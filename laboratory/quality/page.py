"""A report as Markdown: the papers' tables in their layout, the others as lists."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping

import kvq_jax as kvq
from benchmarks.markdown import bracket, head, table, with_interval
from laboratory.quality import ratios
from laboratory.quality.comparison import PLAIN
from laboratory.quality.report import QualityReport, QualityRow

NO_ERROR = 1e-6  # a KL below this is rounding
SIZES = ("spec", "stored bits", "cache KiB")


def page(
    report: QualityReport, file: pathlib.Path, variants: Mapping[str, str] | None = None
) -> str:
    """Render the page of a suite, with the picture of the same name if there is one.

    variants: describes each variant of the model.
    """
    parts = head(report, file, *_said(report, variants or {}))
    picture = file.with_suffix(".png")
    if picture.exists():
        parts.append(f"![{report.title}]({picture.name})")
    for title in report.heads:
        parts += [f"## {title}", *_tables(report, title)]
    return "\n\n".join(parts + ratios.section(report, file.stem))


def _said(report: QualityReport, variants: Mapping[str, str]) -> list[str]:
    said = [
        f"Model: {report.model}. Windows of {report.window} tokens of {report.text.name} are scored"
        f" through the cache, {report.rows[0].tokens} tokens in all."
    ]
    if report.prompt:
        said.append(f"The first {report.prompt} tokens of a window are a prompt and not scored.")
    said.append(
        "Stored bits are of a body element, windows left out; the KVQuant paper's count, where it"
        f" has a rule, is for a context of {report.window} tokens. Cache KiB are of one window,"
        " full-precision tokens in bfloat16. KL is to the full-precision model."
    )
    if report.rows[0].window_kl:
        said.append(
            f"Brackets hold 95 % intervals over the {len(report.rows[0].window_kl)} windows: of a"
            " mean KL by the modified Cox method, of perplexities t intervals of their logs. A"
            " ratio of two caches is the geometric mean of the ratios on the same windows, with its"
            " paired t interval."
        )
    if any(kvq.parse(row.cache).recent == 0 and row.kl > NO_ERROR for row in report.rows):
        said.append(
            "Rows with `recent=0` quantize the newest tokens as well and do not recompute to their"
            " digits on another commit or processor: means move by a few percent, single windows by"
            " up to 8."
        )
    if any(row.fake for row in report.rows):
        said.append(
            "Fake: every token is quantized in one pass over the window, without windows and"
            " without a cache."
        )
    if commits := report.commits():
        said.append(f"Code: {', '.join(commits)}.")
    if stresses := [
        f"{v}: {words}"
        for v, words in variants.items()
        if any(row.variant == v for row in report.rows)
    ]:
        said.append(
            "Beside the model as it is stand variants with the same exact outputs, made by"
            f" laboratory/stress.py: {'; '.join(stresses)}. Their cells, and those of grids, are"
            " perplexity (KL to exact)."
        )
    other = report.other_calibration_text
    if any(row.outlier_fraction for row in report.rows):
        said.append(
            f"Calibrated on {report.samples} samples of {report.sample_length} tokens of"
            f" {report.calibration_text.name}"
            f"{'' if other is None else f'; the other text is {other.name}'}."
        )
    return said


def _tables(report: QualityReport, title: str) -> list[str]:
    rows, heads, variants = report.of(title), report.heads[title], report.variants(title)
    if any(row.column for row in rows):
        return [
            _grid(heads, [row for row in rows if row.variant == variant], variant)
            for variant in variants
        ]
    if variants == [PLAIN]:
        return [_list(report, title, rows)]
    return [table((*heads, *SIZES, *variants), _side_by_side(rows, variants))]


Column = tuple[str, Callable[[QualityRow], str]]


def _list(report: QualityReport, title: str, rows: list[QualityRow]) -> str:
    """Render a line for each cache, with the columns that some line fills."""
    columns: list[Column] = [
        ("spec", lambda row: f"`{row.cache}`"),
        ("stored bits", lambda row: f"{row.stored_bits:.2f}"),
        (
            "the paper's count",
            lambda row: "" if row.paper_bits is None else f"{row.paper_bits:.2f}",
        ),
        ("KL", lambda row: with_interval(row.kl, row.kl_interval, ".5f")),
    ]
    against = next((row for row in rows if row.cells == report.against.get(title)), None)
    if against is not None:
        columns.append(
            (f"over that of {' '.join(against.cells)}", lambda row: _ratio(row, against))
        )
    fake = {row.cells: row for row in report.of(title, fake=True)}
    columns += [
        ("KL, fake", lambda row: _fake(fake.get(row.cells))),
        (
            "perplexity",
            lambda row: f"{row.perplexity:.3f}{bracket(row.perplexity_interval, '.2f')}",
        ),
        ("same top token", lambda row: f"{row.agreement:.2%}"),
        (
            "key outliers dropped",
            lambda row: f"{row.dropped['k']:.1%}" if "k" in row.dropped else "",
        ),
    ]
    filled = [(name, cell) for name, cell in columns if any(cell(row) for row in rows)]
    lines = ((*row.cells, *(cell(row) for _, cell in filled)) for row in rows)
    return table((*report.heads[title], *(name for name, _ in filled)), lines)


def _fake(row: QualityRow | None) -> str:
    return "" if row is None else with_interval(row.kl, row.kl_interval, ".5f")


def _ratio(row: QualityRow, against: QualityRow) -> str:
    """Render the ratio of this KL to another cache's, with its interval; nothing for that cache
    itself and for caches without an error."""
    ratio = row.kl_ratio(against)
    if row.cells == against.cells or math.isnan(ratio.interval.low) or row.kl < NO_ERROR:
        return ""
    return with_interval(*ratio, ".2f")


def _side_by_side(rows: list[QualityRow], variants: list[str]) -> Iterable[tuple[str, ...]]:
    row_of = {(row.cells, row.variant): row for row in rows}
    for cells in dict.fromkeys(row.cells for row in rows):
        first = row_of[cells, variants[0]]
        sizes = f"`{first.cache}`", f"{first.stored_bits:.2f}", f"{first.cache_bytes / 1024:.0f}"
        yield (*cells, *sizes, *(_cell(row_of[cells, variant]) for variant in variants))


def _grid(heads: tuple[str, ...], rows: list[QualityRow], variant: str) -> str:
    columns = list(dict.fromkeys(row.column for row in rows))
    row_of = {(row.cells, row.column): row for row in rows}
    lines = (
        (*cells, *(_cell(row_of[cells, column]) for column in columns))
        for cells in dict.fromkeys(row.cells for row in rows)
    )
    return table((f"{variant}: {', '.join(heads)}", *columns), lines)


def _cell(row: QualityRow) -> str:
    return f"{row.perplexity:.2f} ({with_interval(row.kl, row.kl_interval, '.4f')})"
