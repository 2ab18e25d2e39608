"""The result page of a benchmark on a CPU: a table for each shape but the number of tokens."""

from __future__ import annotations

import itertools
import pathlib
import textwrap

from benchmarks.cpu.timing import ATTENTION, CpuReport, Row
from benchmarks.markdown import head, table

HEADER = (
    "tokens",
    "implementation",
    "ms",
    "best ms",
    "ratio",
    "cache MB",
    "temp MB",
    "peak MB",
    "error",
)
OF_BANDWIDTH = "of bandwidth"
LEGEND = """\
Implementations of one shape are timed in turns; a ratio is of time / baseline's time in the same
round. Times and ratios are medians over the rounds. Cache MB is what the cache (or K and V)
occupies, temp what a compiled step needs besides its arguments, peak all together, by XLA's
account; 1 MB is 10^6 bytes. Error is the largest relative error of an output row against the
reference on the same codes."""

OF_BLOCKS = """\
One decode step in 32, or in the number of tokens that a cache's `block` says, quantizes a block.
With p the median of the other steps and q the median of those, a time or a ratio is here
(1 - 1/block) p + q/block: what a step takes on average."""


def page(report: CpuReport, file: pathlib.Path) -> str:
    """Render the page of a report."""
    loads = f"{min(report.load):g} to {max(report.load):g}"
    said = (
        f"{report.cpu}, {report.cores} cores; load average of the machine meanwhile: {loads}."
        f" Baseline: {report.baseline}."
    )
    parts = [*head(report, file, said), LEGEND]
    if report.grows:
        parts += _of_blocks(report)
    elif ATTENTION in report.command:
        parts.append("Each call adds the same token again: none quantizes a block of tokens.")
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
        lines = (_line(report, row) + _of_bandwidth(row, report.read_bandwidth) for row in rows)
        parts.append(table(header, lines))
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


def _of_blocks(report: CpuReport) -> list[str]:
    """Return how the steps that quantize a block count."""
    cycles = {row.implementation: report.cycle(row) for row in report.rows}
    parts = [OF_BLOCKS] if any(one.ageing for one in cycles.values()) else []
    if lacking := {name: one.block for name, one in cycles.items() if one.left_out}:
        names = ", ".join(f"`{name}`" for name in lacking)
        blocks = " or ".join(map(str, sorted(set(lacking.values()))))
        said = (
            f"**No timed step of {names} quantizes a block** of tokens, as one in {blocks} does:"
            " times and ratios leave out its share."
        )
        parts.append(textwrap.fill(said, 100, break_on_hyphens=False))
    return parts


def _section(row: Row) -> tuple[int, int, int, int]:
    return row.shape.head_dim, row.shape.batch, row.shape.kv_heads, row.shape.group


def _of_bandwidth(row: Row, bandwidth: float) -> tuple[str, ...]:
    return (f"{row.cache_bytes / (1e-3 * row.best_ms) / bandwidth:.0%}",) if bandwidth else ()


def _line(report: CpuReport, row: Row) -> tuple[str, ...]:
    return (
        str(row.shape.tokens),
        row.implementation,
        f"{report.step_ms(row):.2f}",
        f"{row.best_ms:.2f}",
        f"{report.ratio(row) if report.cycle(row).ageing else row.ratio:.2f}",
        *(f"{size / 1e6:.2f}" for size in (row.cache_bytes, row.temp_bytes, row.peak_bytes)),
        f"{row.error:.1e}",
    )
