"""Draws quality_innerq_windows_smollm2.json: KL divergence by the number of exact tokens, Figure 5
of the InnerQ paper; a PNG beside it."""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.quality.report import QualityReport
from benchmarks.report_file import RESULTS
from kvq_jax.files.whole import replacing

FILE = "quality_innerq_windows_smollm2.json"


def draw(report: QualityReport) -> Any:
    """A figure: the two sweeps above each other, variants of the model beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = list(dict.fromkeys(row.table for row in report.rows if row.column))
    if not sweeps:
        raise ValueError("no sweep of windows in this report")
    variants = report.variants(sweeps[0])
    size = 4.2 * len(variants), 3.4 * len(sweeps)
    figure, axes = pyplot.subplots(
        len(sweeps), len(variants), figsize=size, squeeze=False, sharex="row", sharey=True
    )
    for line, sweep in zip(axes, sweeps, strict=True):
        (head,) = report.heads[sweep]
        for axis, variant in zip(line, variants, strict=True):
            rows = [row for row in report.of(sweep) if row.variant == variant]
            for cells, style in zip(
                dict.fromkeys(row.cells for row in rows), itertools.cycle(("-", "-", "--"))
            ):
                points = [(int(row.column), row.kl) for row in rows if row.cells == cells]
                axis.plot(
                    *zip(*points, strict=True), style, marker="o", markersize=4, label=cells[0]
                )
            axis.set(xlabel=f"{head}, tokens", title=f"model: {variant}", yscale="log")
            axis.grid(alpha=0.3, which="both")
        line[0].set_ylabel("KL to the exact model, nats")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.windows_figure", description=__doc__
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=RESULTS,
        help="where the JSON file is (default: %(default)s)",
    )
    file = parser.parse_args(argv).folder / FILE
    try:
        figure = draw(QualityReport.read(file))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    with replacing(file.with_suffix(".png")) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")
    print(file.with_suffix(".png"))


if __name__ == "__main__":
    main()
