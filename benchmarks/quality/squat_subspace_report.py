"""The report of the study of SQuat's subspace: its rows, its page and its figure."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float

from benchmarks.markdown import head, table
from benchmarks.report_file import Report

SCORE_RANKS = (1, 5, 20, 64)
LAMS = (1e-5, 1e-4, 1e-3, 1e-2)
PAPERS = 1e-3  # lambda of the paper's main experiments


@dataclasses.dataclass(frozen=True)
class Deviation:
    """source: whose queries span the subspace. rope: queries after RoPE. values: one for each rank of the report."""

    source: str
    rope: bool
    layer: int
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ScoreError:
    """setting: which keys are coded and which queries they meet. rank and lam are None for KIVI."""

    setting: str
    rank: int | None
    lam: float | None
    layer: int
    error: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """nats: mean -log p of the tokens after a prompt, read from a cache without exact windows."""

    cache: str
    tokens: int
    nats: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubspaceReport(Report):
    """The rows, and what they were measured on. ranks: of the deviations; score_ranks and lams: of the errors."""

    model: str
    text: str
    other_text: str
    prompt_tokens: int
    response_tokens: int
    ranks: tuple[int, ...]
    score_ranks: tuple[int, ...] = SCORE_RANKS
    lams: tuple[float, ...] = LAMS
    deviations: tuple[Deviation, ...]
    errors: tuple[ScoreError, ...]
    predictions: tuple[Prediction, ...]

    def deviation(self, source: str, rope: bool) -> Float[np.ndarray, " ranks"]:
        """Return the mean over the layers."""
        return np.mean([row.values for row in self.deviations if (row.source, row.rope) == (source, rope)], axis=0)

    def layer_ratios(self, setting: str, rank: int, lam: float) -> dict[int, float]:
        """Return SQuat's error over KIVI's by layer."""
        found = {(row.rank, row.lam, row.layer): row.error for row in self.errors if row.setting == setting}
        layers = sorted({layer for *_, layer in found})
        return {layer: found[rank, lam, layer] / found[None, None, layer] for layer in layers}

    def ratio(self, setting: str, rank: int, lam: float) -> float:
        """Return SQuat's error over KIVI's, the geometric mean over the layers."""
        return float(np.exp(np.mean(np.log(list(self.layer_ratios(setting, rank, lam).values())))))

    def settings(self) -> list[str]:
        return list(dict.fromkeys(row.setting for row in self.errors))


def page(report: SubspaceReport, file: pathlib.Path) -> str:
    """Render where later queries lie, and what SQuat makes of it."""
    sources = dict.fromkeys(row.source for row in report.deviations)
    found = [(f"{s}, {'after' if rope else 'before'} RoPE", report.deviation(s, rope)) for rope in (False, True) for s in sources]
    said = (
        f"Model: {report.model}, {report.prompt_tokens} tokens of {report.text}, then {report.response_tokens} that it wrote without "
        f"quantization. Another part is of the same text, another text is {report.other_text}. All numbers are means of the layers; the "
        "file has those of each layer."
    )
    parts = [
        *head(report, file, said),
        f"![deviations by rank, errors by lam]({file.stem}.png)",
        "## Deviation of the response's queries from the subspace of other queries, by rank (the paper's Figure 2, left)",
        table(("queries that span it", *map(str, report.ranks)), ((label, *(f"{v:.2f}" for v in values)) for label, values in found)),
        "## Error of q . k for the response's queries and the prompt's keys, 2 bits, relative to KIVI's (Figure 2, right)",
        "Squat's scores are of queries and keys after RoPE, squat_pre's of keys that were coded before it and then rotated.",
    ]
    for setting in report.settings():
        lines = ((str(rank), *(f"{report.ratio(setting, rank, lam):.2f}" for lam in report.lams)) for rank in report.score_ranks)
        parts.append(table((f"{setting}: rank", *(f"lam {lam:g}" for lam in report.lams)), lines))
    parts.append("## The same by layer")
    parts += [_by_layer(report, rank) for rank in report.score_ranks if rank > 1]
    if report.predictions:
        predicted = ((f"`{row.cache}`", f"{row.nats:.3f}") for row in report.predictions)
        parts += [
            "## Real caches without exact windows: nats of the tokens that follow prompts of the same length in the text",
            table(("cache", f"nats of {report.predictions[0].tokens} tokens"), predicted),
        ]
    return "\n\n".join(parts)


def _by_layer(report: SubspaceReport, rank: int) -> str:
    """Render the ratios of every layer at the paper's lambda."""
    settings = report.settings()
    columns = [report.layer_ratios(setting, rank, PAPERS) for setting in settings]
    lines = ((str(layer), *(f"{column[layer]:.2f}" for column in columns)) for layer in columns[0])
    return table((f"rank {rank}, lam {PAPERS:g}: layer", *settings), lines)


def draw(report: SubspaceReport) -> Any:
    """Draw a figure: deviations by rank on the left, errors relative to KIVI's by lam on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for i, source in enumerate(dict.fromkeys(row.source for row in report.deviations)):
        for rope, style in ((False, "-"), (True, "--")):
            label = f"{source}, {'after' if rope else 'before'} RoPE"
            left.plot(report.ranks, report.deviation(source, rope), style, color=f"C{i}", marker="o", markersize=3, label=label)
    left.set(xlabel="rank of the subspace", ylabel="deviation of the response's queries", ylim=(0, 1))
    for i, setting in enumerate(("queries and keys before RoPE", "squat", "squat:ahead=256", "squat_pre")):
        for rank, style in ((5, "-"), (report.score_ranks[-1], "--")):
            ratios = [report.ratio(setting, rank, lam) for lam in report.lams]
            right.plot(report.lams, ratios, style, color=f"C{i}", marker="o", markersize=3, label=f"{setting}, rank {rank}")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xscale="log", yscale="log", xlabel="lam", ylabel="error of q . k, relative to KIVI's")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small")
    figure.suptitle(
        f"{report.model}: {report.prompt_tokens} tokens of {report.text}, then {report.response_tokens} of its own; mean of the layers"
    )
    figure.tight_layout()
    return figure
