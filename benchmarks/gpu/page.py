"""The result pages of the GPU benchmarks: kernels, and whole decode steps."""

from __future__ import annotations

import itertools
import pathlib

from benchmarks.gpu.report import GpuReport, KernelRow, Trace
from benchmarks.markdown import head, table

SECTIONS = {"attention": "", "quantize": "Quantizing: "}  # of tables, and how their titles begin
KERNEL_HEADER = (
    "candidate",
    "median us",
    "best us",
    "no tokens us",
    "MB",
    "GB/s",
    "of copy",
    "time / best bf16",
    "error",
    "remarks",
)
TRACE_HEADER = ("kernel", "runs in a step", "us of one", "us of a step", "share")
STEP_HEADER = (
    "cache",
    "median ms",
    "best ms",
    "tokens/s",
    "GB",
    "of copy",
    "time / best bf16",
    "error",
    "remarks",
)


def kernels_page(report: GpuReport, file: pathlib.Path) -> str:
    """Render times of kernels: a table for each section and shape."""
    parts = [
        *_head(report, file),
        (
            "Times are the host's clock around a compiled loop of many calls, over their number. A"
            " call is several launches: where those take longer than the work, they are what is"
            ' timed. "No tokens" is the same program over empty rows, so its launches, and rows'
            ' where it takes more than half of the time say "mostly launches"; other code has no'
            " such input, but as much is to be suspected of its rows beside them. Candidates are"
            " timed one after another, not in turn; time / best bf16 divides two medians. GB/s and"
            " the share of the copy bandwidth are of the bytes that must be moved: the keys and"
            " values that attention reads, packed where they are; what a product reads and writes,"
            " and so does quantizing. An error of - was not measured."
        ),
    ]
    for section, title in SECTIONS.items():
        for place, rows in _by_shape(report, section):
            lines = (kernel_line(report, row) for row in rows)
            parts += [f"## {title}{place}", table(KERNEL_HEADER, lines)]
    others = (row for row in report.rows if row.failure and row.section not in SECTIONS)
    if failures := [
        f"- {row.section}, {row.model}, {row.shape.tokens} tokens, {row.name}: {row.failure}"
        for row in others
    ]:
        parts += ["## Failures", "\n".join(failures)]
    return "\n\n".join([*parts, *_skipped(report)])


def step_page(report: GpuReport, file: pathlib.Path) -> str:
    """Render times of whole decode steps: a table for each shape."""
    parts = [
        *_head(report, file),
        (
            "One step of all layers: attention, MLPs and logits; random weights. GB are what a"
            " step must read: the weights and the cache. Times are the host's clock around a"
            " compiled loop of a few steps; candidates are timed one after another, and time /"
            " best bf16 divides two medians, of which the best is that of our own kernels over"
            " bfloat16. asm and jnp are Triton's kernels in either arithmetic, mosaic those on"
            " Mosaic GPU. Error is of the logits, against the same cache read by XLA; - was not"
            " measured."
        ),
    ]
    for place, rows in _by_shape(report, "step"):
        parts += [f"## {place}", table(STEP_HEADER, (_step_line(report, row) for row in rows))]
    for trace in report.traces:
        parts += [
            f"## Microseconds by kernel: {trace.what}",
            _TRACED,
            table(TRACE_HEADER, _trace_lines(trace)),
        ]
    return "\n\n".join([*parts, *_skipped(report)])


def parity_page(report: GpuReport, file: pathlib.Path) -> str:
    """Render errors: of kernels at small shapes, or of many small steps."""
    said = (
        "Largest relative errors against the reference on the same codes, or of the logits of many"
        " steps against XLA's. A row with more than rounding explains says so."
    )
    lines = (
        (
            row.section,
            row.model,
            row.name,
            "" if row.error is None else f"{row.error:.1e}",
            row.wrong,
        )
        for row in report.rows
        if row.section != "bandwidth"
    )
    return "\n\n".join(
        [
            *_head(report, file),
            said,
            table(("section", "model", "candidate", "error", "wrong"), lines),
            *_skipped(report),
        ]
    )


_TRACED = (
    "As JAX's profiler saw them, summed over the layers of a step; a kernel's number in XLA's names"
    " is left out."
)


def _trace_lines(trace: Trace) -> list[tuple[str, ...]]:
    total = sum(kernel.us for kernel in trace.kernels)
    lines = [
        (
            kernel.name,
            f"{kernel.runs / trace.calls:g}",
            f"{kernel.us / kernel.runs:.2f}",
            f"{kernel.us / trace.calls:.1f}",
            f"{kernel.us / total:.1%}",
        )
        for kernel in trace.kernels
    ]
    runs = sum(kernel.runs for kernel in trace.kernels)
    return [*lines, ("all", f"{runs / trace.calls:g}", "", f"{total / trace.calls:.1f}", "100%")]


def _head(report: GpuReport, file: pathlib.Path) -> list[str]:
    copy, read = (report.median_rate(kind) for kind in ("copy", "read"))
    bandwidth = (
        "not measured"
        if copy is None or read is None
        else f"{copy / 1e12:.2f} TB/s (reading alone: {read / 1e12:.2f} TB/s)"
    )
    return head(report, file, f"Copy bandwidth, bytes read and written: {bandwidth}.")


def _skipped(report: GpuReport) -> list[str]:
    return [f"Left out for lack of time: {'; '.join(report.skipped)}."] if report.skipped else []


def _by_shape(report: GpuReport, section: str) -> list[tuple[str, list[KernelRow]]]:
    """Return a section's rows by shape, in the order of models and sizes."""
    chosen = (row for row in report.rows if row.section == section)
    ordered = sorted(chosen, key=lambda row: (row.model, row.shape.batch, row.shape.tokens))
    return [
        (f"{model}, batch {shape.batch}, {shape.tokens} tokens", list(rows))
        for (model, shape), rows in itertools.groupby(
            ordered, key=lambda row: (row.model, row.shape)
        )
    ]


def _step_line(report: GpuReport, row: KernelRow) -> tuple[str, ...]:
    name, *_, share, ratio, error, remarks = kernel_line(report, row)
    if not row.samples_ms:
        return name, *[""] * 7, remarks
    times = (
        f"{row.median_ms:.3f}",
        f"{min(row.samples_ms):.3f}",
        f"{1e3 * row.shape.batch / row.median_ms:.0f}",
    )
    return name, *times, f"{row.moved_bytes / 1e9:.2f}", share, ratio, error, remarks


def kernel_line(report: GpuReport, row: KernelRow) -> tuple[str, ...]:
    def cell(value: float | None, pattern: str) -> str:
        return "" if value is None or not row.samples_ms else pattern.format(value)

    remarks = [] if row.cold or not row.samples_ms else ["partly from L2"]
    remarks += ["mostly launches"] if row.mostly_launches else []
    remarks += [text for text in (row.remark, row.failure) if text]
    error = (
        "-"
        if row.error is None and row.samples_ms and not row.failure
        else cell(row.error, "{:.1e}")
    )
    return (
        row.name,
        cell(1e3 * row.median_ms, "{:.1f}"),
        cell(1e3 * min(row.samples_ms, default=0), "{:.1f}"),
        cell(None if row.idle_ms is None else 1e3 * row.idle_ms, "{:.1f}"),
        cell(row.moved_bytes / 1e6, "{:.1f}"),
        cell(row.rate / 1e9, "{:.0f}"),
        cell(report.share(row), "{:.0%}"),
        cell(report.ratio(row), "{:.2f}"),
        error,
        "; ".join(remarks),
    )
