"""A report as Markdown: the papers' tables in their layout, the others as lists."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from benchmarks.markdown import head, table
from benchmarks.quality.comparison import PLAIN, VARIANTS
from benchmarks.quality.report import QualityReport, QualityRow

LISTED = ("spec", "stored bits", "the paper's count", "perplexity", "KL to exact", "same top token")
SIZES = ("spec", "stored bits", "cache KiB")


def page(report: QualityReport, file: pathlib.Path) -> str:
    """Render the page of a suite. A picture of the same name is shown where there is one."""
    parts = head(report, file, *_said(report))
    picture = file.with_suffix(".png")
    if picture.exists():
        parts.append(f"![{report.title}]({picture.name})")
    for title in report.heads:
        parts += [f"## {title}", *_tables(report, title)]
    return "\n\n".join(parts)


def _said(report: QualityReport) -> list[str]:
    said = [
        f"Model: {report.model}. Windows of {report.window} tokens of {report.text.name} are scored "
        f"through the cache, {report.rows[0].tokens} tokens in all."
    ]
    if report.prompt:
        said.append(f"The first {report.prompt} tokens of a window are a prompt and not scored.")
    said.append(
        "Stored bits are of a body element, windows left out; the KVQuant paper's count, where it has a rule, is for a context of "
        f"{report.window} tokens. Cache KiB are of one window, exact tokens in bfloat16."
    )
    if stresses := [f"{v}: {s}" for v, s in _stresses().items() if any(row.variant == v for row in report.rows)]:
        said.append(
            "Beside the model as it is stand variants with the same exact outputs, made as `kvq stress` makes them: "
            f"{'; '.join(stresses)}. Their cells, and those of grids, are perplexity (KL to exact)."
        )
    if any(row.outlier_fraction for row in report.rows):
        said.append(
            f"Calibrated on {report.samples} samples of {report.sample_length} tokens of {report.calibration_text.name}; the other text is "
            f"{report.other_calibration_text.name}. With a KV width of 128, 1 % of outliers is 2 values of a token, 1.56 %."
        )
    return said


def _stresses() -> dict[str, str]:
    found = {}
    for name, stress in VARIANTS.items():
        kinds = () if stress is None else (("key", "RoPE pairs", stress.key_outliers), ("value", "channels", stress.value_outliers))
        for kind, what, outliers in kinds:
            if outliers is not None:
                found[name] = f"{outliers.channels} {what} of each head's {kind}s times {outliers.factor:g}"
    return found


def _tables(report: QualityReport, title: str) -> list[str]:
    rows, heads, variants = report.of(title), report.heads[title], report.variants(title)
    if any(row.column for row in rows):
        return [_grid(heads, [row for row in rows if row.variant == variant], variant) for variant in variants]
    if variants == [PLAIN]:
        return [table((*heads, *LISTED), map(_listed, rows))]
    return [table((*heads, *SIZES, *variants), _side_by_side(rows, variants))]


def _listed(row: QualityRow) -> tuple[str, ...]:
    counted = "" if row.paper_bits is None else f"{row.paper_bits:.2f}"
    measured = f"{row.perplexity:.3f}", f"{row.kl:.5f}", f"{row.agreement:.2%}"
    return (*row.cells, f"`{row.cache}`", f"{row.stored_bits:.2f}", counted, *measured)


def _side_by_side(rows: list[QualityRow], variants: list[str]) -> Iterable[tuple[str, ...]]:
    found = {(row.cells, row.variant): row for row in rows}
    for cells in dict.fromkeys(row.cells for row in rows):
        first = found[cells, variants[0]]
        sizes = f"`{first.cache}`", f"{first.stored_bits:.2f}", f"{first.cache_bytes / 1024:.0f}"
        yield (*cells, *sizes, *(_cell(found[cells, variant]) for variant in variants))


def _grid(heads: tuple[str, ...], rows: list[QualityRow], variant: str) -> str:
    columns = list(dict.fromkeys(row.column for row in rows))
    found = {(row.cells, row.column): row for row in rows}
    lines = ((*cells, *(_cell(found[cells, column]) for column in columns)) for cells in dict.fromkeys(row.cells for row in rows))
    return table((f"{variant}: {', '.join(heads)}", *columns), lines)


def _cell(row: QualityRow) -> str:
    return f"{row.perplexity:.2f} ({row.kl:.4f})"
