"""Measure how alike successive layers' inputs, keys and values are: Figure 3 of the XQuant paper in
numbers.

    cosine    mean over the tokens of  a_i . a_{i-1} / (|a_i| |a_{i-1}|)
    range     mean over the tokens and their groups of channels of  (max - min) of a_i - a_{i-1}
              over  (max - min) of a_i

The range sets the step of a uniform quantizer, so where it is below 1, XQuant-CL's differences are
easier to code than what they are taken of. Rows are those of the exact forward pass over windows of
a text, each a sequence of its own; means are over the tokens of all windows, and intervals
are over the windows. Post-norm X is the normalized input, which XQuant caches and the figure shows;
unit-norm X leaves the layer's own gains out; the residual stream is what both are made of; keys are
before RoPE, all heads of a token together. The JSON, and the plot beside it:

    python -m benchmarks.quality.layer_similarity --model smollm2 --text FILE --json
    benchmarks/results/layer_similarity_smollm2.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvq_jax as kvq
from benchmarks.markdown import head, table, with_interval
from benchmarks.quality.intervals import Estimate, mean_interval
from benchmarks.quality.squat_subspace import layer_inputs
from benchmarks.quality.study import first_tokens, model_words, run_study, shown, study_parser
from benchmarks.report_file import Report, header
from kvq_models import load_llama

KINDS = ("post-norm X", "unit-norm X", "residual stream", "keys", "values")
FIRST_DIFFERENCE = 3  # the layer after XQuant-CL's base, the paper's third one
FIELDS = {"cosines": "cosine", "ranges": "range of the difference, relative"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A layer and the one before it: a cosine and a range of each window for each of `KINDS`,
    [windows][kinds]."""

    layer: int
    cosines: tuple[tuple[float, ...], ...]
    ranges: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityReport(Report):
    """A row for each layer but the first, and what they were measured on. tokens: of a window."""

    model: str
    text: str
    windows: int
    tokens: int
    group: int
    kinds: tuple[str, ...]
    pairs: tuple[Pair, ...]

    def means(self, field: str, start: int, stop: int | None = None) -> list[Estimate]:
        """Return the mean of a field over the pairs of layers start .. stop - 1, to the last
        without stop, for each kind."""
        pairs = [
            getattr(pair, field)
            for pair in self.pairs
            if start <= pair.layer and (stop is None or pair.layer < stop)
        ]
        columns = np.mean(pairs, axis=0).T.tolist()  # [kinds][windows]
        return [Estimate(float(np.mean(column)), mean_interval(column)) for column in columns]

    def of_layers(self, field: str) -> list[list[Estimate]]:
        """Return a field of every pair, [pairs][kinds]."""
        return [self.means(field, pair.layer, pair.layer + 1) for pair in self.pairs]


def rows_of(inputs: kvq.LayerInputs) -> tuple[Float[np.ndarray, "T C"], ...]:
    """Return the rows of one sequence in the order of `KINDS`, fp32."""
    assert inputs.x is not None
    assert inputs.residual is not None
    assert inputs.k_pre is not None
    unit = inputs.residual / jnp.sqrt(jnp.mean(jnp.square(inputs.residual), axis=-1, keepdims=True))
    keys, values = (
        jnp.moveaxis(rows, 1, 2).reshape(*inputs.x.shape[:2], -1)
        for rows in (inputs.k_pre, inputs.v)
    )
    x, unit_rows, stream, k, v = (
        np.asarray(rows[0], np.float32) for rows in (inputs.x, unit, inputs.residual, keys, values)
    )
    return x, unit_rows, stream, k, v


def cosine(rows: Float[np.ndarray, "T C"], before: Float[np.ndarray, "T C"]) -> float:
    """Return the mean cosine between the rows of a token."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(before, axis=1)
    return float(np.mean(np.sum(rows * before, axis=1) / lengths))


def relative_range(
    rows: Float[np.ndarray, "T C"], before: Float[np.ndarray, "T C"], group: int
) -> float:
    """Return the mean range of a group of the difference over that of the rows. ValueError where
    the group does not divide the width."""
    if rows.shape[1] % group:
        raise ValueError(f"groups of {group} channels do not divide rows of {rows.shape[1]}")

    def ranges(a: Float[np.ndarray, "T C"]) -> Float[np.ndarray, "T groups"]:
        return np.ptp(a.reshape(len(a), -1, group), axis=2)

    return float(np.mean(ranges(rows - before) / ranges(rows)))


def measured(
    layers: Sequence[kvq.LayerInputs], group: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the cosines and the ranges of one sequence, [pairs][kinds]."""
    rows = list(map(rows_of, layers))
    pairs = [list(zip(after, before, strict=True)) for before, after in itertools.pairwise(rows)]
    cosines = [[round(cosine(after, before), 5) for after, before in pair] for pair in pairs]
    return cosines, [
        [round(relative_range(after, before, group), 5) for after, before in pair] for pair in pairs
    ]


def run(options: argparse.Namespace) -> SimilarityReport:
    """Measure every pair of layers. ValueError where the text is too short, or a group does not
    divide the model's widths."""
    llama, tokenizer = load_llama(options.model, dtype="float32")
    windows = first_tokens(tokenizer, options.text, options.windows * options.tokens).reshape(
        options.windows, options.tokens
    )
    cosines, ranges = zip(
        *(measured(layer_inputs(llama, window), options.group) for window in windows), strict=True
    )
    by_layer = zip(zip(*cosines, strict=True), zip(*ranges, strict=True), strict=True)
    return SimilarityReport(
        title=f"Similarity of successive layers, {shown(options.model)}",
        **header(_command(options)),
        model=f"{shown(options.model)}, float32",
        text=options.text.name,
        windows=options.windows,
        tokens=options.tokens,
        group=options.group,
        kinds=KINDS,
        pairs=tuple(
            Pair(layer, *(tuple(map(tuple, field)) for field in fields))
            for layer, fields in enumerate(by_layer, start=1)
        ),
    )


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line, files by their names."""
    model = model_words(options.model)
    sizes = [f"--{name} {getattr(options, name)}" for name in ("windows", "tokens", "group")]
    return [
        "benchmarks.quality.layer_similarity",
        *model,
        f"--text {options.text.name}",
        *sizes,
        f"--json {options.json.name}",
    ]


def page(report: SimilarityReport, file: pathlib.Path) -> str:
    """Render cosines and ranges of every pair, and their means."""
    said = (
        f"Model: {report.model}, the first {report.windows} windows of {report.tokens} tokens of"
        f" {report.text}, exact. Each layer with the one before it. Ranges are of groups of"
        f" {report.group} channels of a token: that of the difference over that of the layer's own"
        " rows. Brackets hold 95 % t intervals over the windows."
    )
    parts = [*head(report, file, said), f"![similarity by layer]({file.stem}.png)"]
    for field, name in FIELDS.items():
        lines = [("mean", *_cells(report.means(field, 1)))]
        if report.pairs[-1].layer > FIRST_DIFFERENCE:
            lines.append(
                (f"mean from {FIRST_DIFFERENCE} on", *_cells(report.means(field, FIRST_DIFFERENCE)))
            )
        lines += [
            (str(pair.layer), *_cells(found))
            for pair, found in zip(report.pairs, report.of_layers(field), strict=True)
        ]
        parts.append(table((f"{name.capitalize()}: layer", *report.kinds), lines))
    return "\n\n".join(parts)


def _cells(found: Sequence[Estimate]) -> list[str]:
    return [with_interval(*one, ".3f") for one in found]


def draw(report: SimilarityReport) -> Any:
    """Draw a figure: cosines on the left, ranges on the right, by layer, with bands that are the
    intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    layers = [pair.layer for pair in report.pairs]
    for axis, (field, name) in zip(axes, FIELDS.items(), strict=True):
        for kind, found in zip(
            report.kinds, zip(*report.of_layers(field), strict=True), strict=True
        ):
            axis.plot(layers, [one.value for one in found], marker="o", markersize=3, label=kind)
            axis.fill_between(
                layers, *zip(*(one.interval for one in found), strict=True), alpha=0.25
            )
        axis.set(xlabel="layer", ylabel=f"{name}, to the layer before")
        axis.grid(alpha=0.3)
    axes[1].axhline(1, color="grey", linewidth=0.8)
    axes[0].legend(fontsize="small")
    figure.suptitle(
        f"{report.model}: {report.windows} windows of {report.tokens} tokens of {report.text}"
    )
    figure.tight_layout()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("benchmarks.quality.layer_similarity", __doc__, plot=True)
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=pathlib.Path,
        required=True,
        help="the text that the model reads",
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=8,
        help="windows of it, from its beginning; intervals are over them",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a window")
    parser.add_argument(
        "--group", type=int, default=64, help="channels of a token that share a range"
    )
    run_study(parser, argv, run, draw)


if __name__ == "__main__":
    main()
