"""Draw a report of the suite `waterfill`: KL over stored bits, a line for each method, with
intervals.

The PNG lies beside the JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import kvq_jax as kvq
from benchmarks.quality.report import QualityReport, QualityRow
from kvq_jax.files.whole import replacing

OURS = "waterfill"
MARKERS = "osD^v<>Pp*hX"
WIDTH, HEIGHT = 10, 6.5  # inches


def draw(report: QualityReport) -> Any:
    """Draw a figure with stored bits of a body element to the right and KL upwards. Whiskers are 95
    % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    rows = list({row.cache: row for row in report.rows}.values())
    methods = sorted({_method(row) for row in rows}, key=lambda name: (name != OURS, name))
    for name, (index, marker) in zip(methods, itertools.cycle(enumerate(MARKERS)), strict=False):
        points = sorted(
            (row for row in rows if _method(row) == name), key=lambda row: row.stored_bits
        )
        bits, kl = [row.stored_bits for row in points], [row.kl for row in points]
        below = [max(row.kl - row.kl_interval.low, 0) for row in points]
        above = [max(row.kl_interval.high - row.kl, 0) for row in points]
        style = (
            {"linewidth": 2.5, "color": "#c2255c", "zorder": 5}
            if name == OURS
            else {"linewidth": 0.8, "color": f"C{index % 10}"}
        )
        axes.errorbar(
            bits,
            kl,
            yerr=(below, above),
            marker=marker,
            markersize=5,
            elinewidth=0.6,
            label=name,
            **style,
        )
    axes.set(
        xlabel="stored bits of a body element",
        ylabel="KL to full precision, nats per token",
        yscale="log",
    )
    axes.set_title(
        f"{report.model}\n{report.text.name}, {report.windows} windows, after a prompt of"
        f" {report.prompt} tokens",
        fontsize="medium",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", ncols=2)
    return figure


def _method(row: QualityRow) -> str:
    spec = kvq.parse(row.cache)
    return spec.k.name if spec.k == spec.v else f"{spec.k.name} + {spec.v.name}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.front_figure", description=__doc__
    )
    parser.add_argument(
        "file", type=pathlib.Path, help="what `python -m benchmarks.quality waterfill` wrote"
    )
    file = parser.parse_args(argv).file
    try:
        figure = draw(QualityReport.read(file))
    except (OSError, ValueError, TypeError) as error:
        parser.exit(2, f"{error}\n")
    with replacing(file.with_suffix(".png")) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")
    print(file.with_suffix(".png"))


if __name__ == "__main__":
    main()
