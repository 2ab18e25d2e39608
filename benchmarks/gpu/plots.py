"""Draw kernels_*.json: time against context, and the share of the copy bandwidth, a PNG and an SVG
for each model.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.report import GpuReport, KernelRow
from benchmarks.report_file import RESULTS
from kvq_jax.files.whole import replacing

Lines = dict[str, list[tuple[int, float]]]  # (tokens, value) by candidate


def draw(report: GpuReport, model: str) -> Any:
    """Draw a figure: batches above each other, times left, shares right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        row
        for row in report.rows
        if (row.section, row.model) == ("attention", model) and row.samples_ms
    ]
    batches = sorted({row.shape.batch for row in rows})
    figure, axes = pyplot.subplots(len(batches), 2, figsize=(13, 4.5 * len(batches)), squeeze=False)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row.candidate for row in rows))}
    for (left, right), batch in zip(axes, batches, strict=True):
        best = fastest(row for row in rows if row.shape.batch == batch)
        times = lines((row, 1e3 * row.median_ms) for row in best)
        shares = lines(
            (row, 100 * share) for row in best if (share := report.share(row)) is not None
        )
        for axis, drawn, label in (
            (left, times, "microseconds"),
            (right, shares, "% of the measured copy bandwidth"),
        ):
            for name, points in drawn.items():
                style = "--" if "bf16" in name else "-"
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    marker="o",
                    markersize=3,
                    color=colours[name],
                    label=name,
                )
            axis.set_xscale("log", base=2)
            axis.set(xlabel="tokens", ylabel=label, title=f"{model}, batch {batch}")
            axis.grid(alpha=0.3)
        left.set_yscale("log")
        right.set_ylim(bottom=0)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(
        f"Decode attention of one layer: {report.device}, JAX {report.jax_version}, {report.date}"
    )
    figure.tight_layout()
    return figure


def fastest(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """Return the row of the faster arithmetic, of each candidate at each shape."""
    best: dict[Any, KernelRow] = {}
    for row in rows:
        if row.key not in best or row.median_ms < best[row.key].median_ms:
            best[row.key] = row
    return list(best.values())


def lines(values: Iterable[tuple[KernelRow, float]]) -> Lines:
    drawn: Lines = {}
    for row, value in values:
        drawn.setdefault(row.candidate, []).append((row.shape.tokens, value))
    return {name: sorted(points) for name, points in drawn.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.plots", description=__doc__)
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=RESULTS,
        help="where the JSON files are (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    files = sorted(args.folder.glob("kernels_*.json"))
    if not files:
        parser.exit(
            2,
            f"no kernels_*.json in {args.folder}: run benchmarks/gpu/gpu.sh on a machine with a GPU"
            " first\n",
        )
    for file in files:
        report = GpuReport.read(file)
        for model in dict.fromkeys(
            row.model for row in report.rows if row.section == "attention" and row.samples_ms
        ):
            figure = draw(report, model)
            for ending in ("png", "svg"):
                target = file.with_name(f"{file.stem}_{model.lower()}.{ending}")
                with replacing(target) as unfinished:
                    figure.savefig(unfinished, dpi=120, format=ending)
                print(target)


if __name__ == "__main__":
    main()
