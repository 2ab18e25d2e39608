"""The report of the study of SQuat's subspace: its rows, its page and its figure."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from benchmarks.markdown import head, table, with_interval
from benchmarks.quality.intervals import Estimate, mean_interval, paired_ratio
from benchmarks.report_file import Report

SCORE_RANKS = (1, 5, 20, 64)
LAMS = (1e-5, 1e-4, 1e-3, 1e-2)
PAPERS = 1e-3  # lambda of the paper's main experiments


@dataclasses.dataclass(frozen=True)
class Deviation:
    """source: whose queries span the subspace. rope: queries after RoPE. windows: of each window,
    one for each rank of the report."""

    source: str
    rope: bool
    layer: int
    windows: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class ScoreError:
    """setting: which keys are coded and which queries they meet. rank and lam are None for KIVI.
    windows: the error of each window."""

    setting: str
    rank: int | None
    lam: float | None
    layer: int
    windows: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """window_nats: mean -log p of the tokens after the prompt of each window, read from a cache
    without exact windows. tokens: of all."""

    cache: str
    tokens: int
    window_nats: tuple[float, ...]

    @property
    def nats(self) -> Estimate:
        return Estimate(float(np.mean(self.window_nats)), mean_interval(self.window_nats))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubspaceReport(Report):
    """The rows, and what they were measured on. windows: prompts with a response of their own.
    ranks: of the deviations; score_ranks and lams: of the errors."""

    model: str
    text: str
    other_text: str
    windows: int
    prompt_tokens: int
    response_tokens: int
    ranks: tuple[int, ...]
    score_ranks: tuple[int, ...] = SCORE_RANKS
    lams: tuple[float, ...] = LAMS
    deviations: tuple[Deviation, ...]
    errors: tuple[ScoreError, ...]
    predictions: tuple[Prediction, ...]

    def deviation(self, source: str, rope: bool) -> list[Estimate]:
        """Return the mean over the layers for each rank."""
        layers = [
            row.windows for row in self.deviations if (row.source, row.rope) == (source, rope)
        ]
        columns = np.mean(layers, axis=0).T.tolist()  # [ranks][windows]
        return [Estimate(float(np.mean(column)), mean_interval(column)) for column in columns]

    def layer_ratios(self, setting: str, rank: int, lam: float) -> dict[int, Estimate]:
        """Return the ratio of SQuat's error to KIVI's on the same windows, by layer."""
        ours, kivi = self._errors(setting, rank, lam), self._errors(setting, None, None)
        return {layer: paired_ratio(ours[layer], kivi[layer]) for layer in ours}

    def ratio(self, setting: str, rank: int, lam: float) -> Estimate:
        """Return the ratio of SQuat's error to KIVI's, the geometric mean over the layers and the
        windows."""
        ours, kivi = (
            np.exp(np.log([*self._errors(setting, *grid).values()]).mean(axis=0)).tolist()
            for grid in ((rank, lam), (None, None))
        )  # [windows]
        return paired_ratio(ours, kivi)

    def settings(self) -> list[str]:
        return list(dict.fromkeys(row.setting for row in self.errors))

    def _errors(
        self, setting: str, rank: int | None, lam: float | None
    ) -> dict[int, tuple[float, ...]]:
        """Return the errors of every window by layer."""
        rows = (
            row for row in self.errors if (row.setting, row.rank, row.lam) == (setting, rank, lam)
        )
        return {row.layer: row.windows for row in rows}


def page(report: SubspaceReport, file: pathlib.Path) -> str:
    """Render where later queries lie, and what SQuat makes of it."""
    sources = dict.fromkeys(row.source for row in report.deviations)
    found = [
        (f"{s}, {'after' if rope else 'before'} RoPE", report.deviation(s, rope))
        for rope in (False, True)
        for s in sources
    ]
    said = (
        f"Model: {report.model}, {report.windows} windows of {report.prompt_tokens} tokens of"
        f" {report.text}, each followed by {report.response_tokens} that it wrote without"
        f" quantization. Another part is of the same text, another text is {report.other_text}."
        " All numbers are means of the layers and of the windows, of ratios geometric ones, and the"
        " file has those of each layer. Brackets hold 95 % t intervals over the windows, for ratios"
        " to KIVI of the logs of the ratios on the same windows."
    )
    parts = [
        *head(report, file, said),
        f"![deviations by rank, errors by lam]({file.stem}.png)",
        (
            "## Deviation of the response's queries from the subspace of other queries, by rank"
            " (the paper's Figure 2, left)"
        ),
        table(
            ("queries that span it", *map(str, report.ranks)),
            ((label, *_cells(values)) for label, values in found),
        ),
        (
            "## Error of q . k for the response's queries and the prompt's keys, 2 bits, relative"
            " to KIVI's (Figure 2, right)"
        ),
        (
            "Squat's scores are of queries and keys after RoPE, squat_pre's of keys that were coded"
            " before it and then rotated."
        ),
    ]
    for setting in report.settings():
        lines = (
            (str(rank), *_cells([report.ratio(setting, rank, lam) for lam in report.lams], ".3f"))
            for rank in report.score_ranks
        )
        parts.append(table((f"{setting}: rank", *(f"lam {lam:g}" for lam in report.lams)), lines))
    parts.append("## The same by layer")
    parts += [_by_layer(report, rank) for rank in report.score_ranks if rank > 1]
    if report.predictions:
        predicted = (
            (f"`{row.cache}`", with_interval(*row.nats, ".3f")) for row in report.predictions
        )
        parts += [
            (
                "## Real caches without exact windows: nats of the tokens that follow prompts of"
                " the same length in the text"
            ),
            table(("cache", f"nats of {report.predictions[0].tokens} tokens"), predicted),
        ]
    return "\n\n".join(parts)


def _by_layer(report: SubspaceReport, rank: int) -> str:
    """Render the ratios of every layer at the paper's lambda."""
    settings = report.settings()
    columns = [report.layer_ratios(setting, rank, PAPERS) for setting in settings]
    lines = ((str(layer), *_cells([column[layer] for column in columns])) for layer in columns[0])
    return table((f"rank {rank}, lam {PAPERS:g}: layer", *settings), lines)


def _cells(found: list[Estimate], format: str = ".2f") -> list[str]:
    return [with_interval(*one, format) for one in found]


def draw(report: SubspaceReport) -> Any:
    """Draw a figure: deviations by rank on the left, errors relative to KIVI's by lam on the right,
    with bands that are the intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for i, source in enumerate(dict.fromkeys(row.source for row in report.deviations)):
        for rope, style in ((False, "-"), (True, "--")):
            label = f"{source}, {'after' if rope else 'before'} RoPE"
            _line(
                left,
                report.ranks,
                report.deviation(source, rope),
                style,
                color=f"C{i}",
                label=label,
            )
    left.set(
        xlabel="rank of the subspace", ylabel="deviation of the response's queries", ylim=(0, 1)
    )
    for i, setting in enumerate(
        ("queries and keys before RoPE", "squat", "squat:ahead=256", "squat_pre")
    ):
        for rank, style in ((5, "-"), (report.score_ranks[-1], "--")):
            ratios = [report.ratio(setting, rank, lam) for lam in report.lams]
            _line(right, report.lams, ratios, style, color=f"C{i}", label=f"{setting}, rank {rank}")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xscale="log", yscale="log", xlabel="lam", ylabel="error of q . k, relative to KIVI's")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small")
    figure.suptitle(
        f"{report.model}: {report.windows} times {report.prompt_tokens} tokens of {report.text},"
        f" then {report.response_tokens} of its own; mean of the layers"
    )
    figure.tight_layout()
    return figure


def _line(axis: Any, x: tuple[float, ...], found: list[Estimate], style: str, **looks: Any) -> None:
    axis.plot(x, [one.value for one in found], style, marker="o", markersize=3, **looks)
    axis.fill_between(
        x, *zip(*(one.interval for one in found), strict=True), color=looks["color"], alpha=0.15
    )
