"""Makes benchmarks/results/README.md from the JSON files beside it. Run it after a benchmark; never edit its output by hand."""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Iterable, Sequence

from benchmarks.common import Report, Row
from benchmarks.machine_code.report import HEADER as COUNTS_HEADER
from benchmarks.machine_code.report import Instructions

RESULTS = pathlib.Path(__file__).parent / "results"
HEADER = ("tokens", "implementation", "median ms", "best ms", "ratio", "cache MB", "temp MB", "peak MB", "error")
INTRODUCTION = """\
# Results

Made from the JSON files in this folder by `python -m benchmarks.tables`; every sample is in them. Implementations of one shape are timed in
turn, and a ratio is the median over rounds of (time / baseline's time in the same round). Cache MB is what the cache (or K and V) occupies,
temp what a compiled step needs beside its arguments, peak all together, by XLA's account; 1 MB is 10^6 bytes. Error is the largest
relative error of an output row against the reference on the same codes.
"""


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A GitHub table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def report_section(report: Report, name: str) -> str:
    """One report: where and when, then a table for each batch size and head dim."""
    loads = f"{min(report.load):g} to {max(report.load):g}"
    parts = [
        f"## {report.title}",
        f"`{report.command}` on {report.date}: {report.cpu}, {report.cores} cores, device {report.device}; JAX {report.jax_version}, "
        f"Python {report.python_version}. Load average of the machine meanwhile: {loads}. Baseline: {report.baseline}. "
        f"Raw samples: [{name}]({name}).",
    ]
    rows = sorted(report.rows, key=_section)
    for (head_dim, batch, kv_heads, group), found in itertools.groupby(rows, key=_section):
        parts.append(f"### Head dim {head_dim}, batch {batch}, {kv_heads} KV heads with {group} query heads each")
        parts.append(table(HEADER, map(_line, found)))
    return "\n\n".join(parts)


def instructions_section(counts: Instructions, name: str) -> str:
    """What the kernels' main loops cost, by target."""
    return "\n\n".join(
        (
            "## Instructions of the GPU kernels",
            f"`{counts.command}` on {counts.date}; JAX {counts.jax_version}, ptxas {counts.ptxas_version}. Counted in the machine code "
            "of each kernel's main loop, compiled without a GPU: what the instructions allow, not how fast a kernel runs. Per element is "
            f"per cached element, K or V. Raw counts: [{name}]({name}).",
            table(COUNTS_HEADER, (row.line() for row in counts.rows)),
        )
    )


def section(file: pathlib.Path) -> str:
    """The section of one JSON file."""
    if file.stem == "instructions":
        return instructions_section(Instructions.read(file), file.name)
    return report_section(Report.read(file), file.name)


def _section(row: Row) -> tuple[int, int, int, int]:
    return row.shape.head_dim, row.shape.batch, row.shape.kv_heads, row.shape.group


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


def render(folder: pathlib.Path) -> str:
    """The page for a folder of reports. ValueError where the folder has none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"no results in {folder}: run `python -m benchmarks.attention --json {folder}/attention.json` first")
    sections = map(section, files)
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    made.add_argument("--folder", type=pathlib.Path, default=RESULTS, help="where the JSON files are (default: %(default)s)")
    args = made.parse_args(argv)
    try:
        page = render(args.folder)
    except ValueError as error:
        made.exit(2, f"{error}\n")
    (args.folder / "README.md").write_text(page, encoding="utf-8")
    print(args.folder / "README.md")


if __name__ == "__main__":
    main()
