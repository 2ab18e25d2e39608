"""The result page of a benchmark on a CPU: a table for each shape but the number of tokens."""

from __future__ import annotations

import itertools
import pathlib

from benchmarks.cpu.timing import CpuReport, Row
from benchmarks.markdown import head, table

HEADER = (
    "tokens",
    "implementation",
    "median ms",
    "best ms",
    "ratio",
    "cache MB",
    "temp MB",
    "peak MB",
    "error",
)
OF_BANDWIDTH = "of bandwidth"
LEGEND = """\
Implementations of one shape are timed in turn; a ratio is the median over rounds of time /
baseline's time in the same round. Cache MB is what the cache (or K and V) occupies, temp what a
compiled step needs besides its arguments, peak all together, by XLA's account; 1 MB is 10^6 bytes.
Error is the largest relative error of an output row against the reference on the same codes."""


def page(report: CpuReport, file: pathlib.Path) -> str:
    """Render the page of a report."""
    loads = f"{min(report.load):g} to {max(report.load):g}"
    said = (
        f"{report.cpu}, {report.cores} cores; load average of the machine meanwhile: {loads}."
        f" Baseline: {report.baseline}."
    )
    parts = [*head(report, file, said), LEGEND]
    if report.read_bandwidth:
        parts.append(
            "Of bandwidth: the bytes of the cache over the best time, beside the"
            f" {report.read_bandwidth / 1e9:.1f} GB/s at which all cores read memory: what is far"
            " below is bound by arithmetic. Caches that fit the processor's own may be above."
        )
    for (head_dim, batch, kv_heads, group), rows in itertools.groupby(
        sorted(report.rows, key=_section), key=_section
    ):
        parts.append(
            f"## Head dim {head_dim}, batch {batch}, {kv_heads} KV heads with {group} query heads"
            " each"
        )
        header = (*HEADER, OF_BANDWIDTH) if report.read_bandwidth else HEADER
        parts.append(
            table(header, (_line(row) + _of_bandwidth(row, report.read_bandwidth) for row in rows))
        )
    return "\n\n".join(parts)


def subject(report: CpuReport) -> str:
    """Name what is timed, for the index."""
    names = [
        f"`{name}`"
        for name in dict.fromkeys(row.implementation for row in report.rows)
        if name != report.baseline
    ]
    shown = ", ".join(names) if len(names) < 7 else f"{len(names)} implementations"
    return f"time, memory and error of {shown} beside {report.baseline}"


def _section(row: Row) -> tuple[int, int, int, int]:
    return row.shape.head_dim, row.shape.batch, row.shape.kv_heads, row.shape.group


def _of_bandwidth(row: Row, bandwidth: float) -> tuple[str, ...]:
    return (f"{row.cache_bytes / (1e-3 * row.best_ms) / bandwidth:.0%}",) if bandwidth else ()


def _line(row: Row) -> tuple[str, ...]:
    return (
        str(row.shape.tokens),
        row.implementation,
        f"{row.median_ms:.2f}",
        f"{row.best_ms:.2f}",
        f"{row.ratio:.2f}",
        *(f"{size / 1e6:.2f}" for size in (row.cache_bytes, row.temp_bytes, row.peak_bytes)),
        f"{row.error:.1e}",
    )
