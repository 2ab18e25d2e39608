"""Measure how alike successive layers' inputs, keys and values are: Figure 3 of the XQuant paper in numbers.

    cosine    mean over the tokens of  a_i . a_{i-1} / (|a_i| |a_{i-1}|)
    range     mean over the tokens and their groups of channels of  (max - min) of a_i - a_{i-1}  over  (max - min) of a_i

The range sets the step of a uniform quantizer, so where it is below 1, XQuant-CL's differences are easier to code than what they are taken
of. Rows are those of the exact forward pass. Post-norm X is the normalized input, which XQuant caches and the figure shows; unit-norm X
leaves the layer's own gains out; the residual stream is what both are made of; keys are before RoPE, all heads of a token together. The
JSON, and the plot beside it:

    python -m benchmarks.quality.layer_similarity --model smollm2 --text FILE --json benchmarks/results/layer_similarity_smollm2.json
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.quality.squat_subspace import layer_inputs
from benchmarks.quality.study import first_tokens, model_words, run_study, shown, study_parser
from benchmarks.report_file import Report, header
from kvq_models import load_llama

KINDS = ("post-norm X", "unit-norm X", "residual stream", "keys", "values")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A layer and the one before it: one cosine and one range for each of `KINDS`."""

    layer: int
    cosines: tuple[float, ...]
    ranges: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityReport(Report):
    """A row for each layer but the first, and what they were measured on."""

    model: str
    text: str
    tokens: int
    group: int
    kinds: tuple[str, ...]
    pairs: tuple[Pair, ...]


def rows_of(inputs: kvq.LayerInputs) -> tuple[Float[np.ndarray, "T C"], ...]:
    """Return the rows of one sequence in the order of `KINDS`, fp32."""
    assert inputs.x is not None
    assert inputs.residual is not None
    assert inputs.k_pre is not None
    unit = inputs.residual / jnp.sqrt(jnp.mean(jnp.square(inputs.residual), axis=-1, keepdims=True))
    keys, values = (jnp.moveaxis(rows, 1, 2).reshape(*inputs.x.shape[:2], -1) for rows in (inputs.k_pre, inputs.v))
    x, unit_rows, stream, k, v = (np.asarray(rows[0], np.float32) for rows in (inputs.x, unit, inputs.residual, keys, values))
    return x, unit_rows, stream, k, v


def cosine(rows: Float[np.ndarray, "T C"], before: Float[np.ndarray, "T C"]) -> float:
    """Return the mean cosine between the rows of a token."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(before, axis=1)
    return float(np.mean(np.sum(rows * before, axis=1) / lengths))


def relative_range(rows: Float[np.ndarray, "T C"], before: Float[np.ndarray, "T C"], group: int) -> float:
    """Return the mean range of a group of the difference over that of the rows. ValueError where the group does not divide the width."""
    if rows.shape[1] % group:
        raise ValueError(f"groups of {group} channels do not divide rows of {rows.shape[1]}")

    def ranges(a: Float[np.ndarray, "T C"]) -> Float[np.ndarray, "T groups"]:
        return np.ptp(a.reshape(len(a), -1, group), axis=2)

    return float(np.mean(ranges(rows - before) / ranges(rows)))


def run(options: argparse.Namespace) -> SimilarityReport:
    """Measure every pair of layers. ValueError where the text is too short, or a group does not divide the model's widths."""
    llama, tokenizer = load_llama(options.model, dtype="float32")
    layers = [rows_of(inputs) for inputs in layer_inputs(llama, first_tokens(tokenizer, options.text, options.tokens))]
    pairs = [
        Pair(
            layer,
            tuple(round(cosine(a, b), 5) for a, b in zip(layers[layer], layers[layer - 1], strict=True)),
            tuple(round(relative_range(a, b, options.group), 5) for a, b in zip(layers[layer], layers[layer - 1], strict=True)),
        )
        for layer in range(1, len(layers))
    ]
    return SimilarityReport(
        title=f"Similarity of successive layers, {shown(options.model)}",
        **header(_command(options)),
        model=f"{shown(options.model)}, float32",
        text=options.text.name,
        tokens=options.tokens,
        group=options.group,
        kinds=KINDS,
        pairs=tuple(pairs),
    )


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line, files by their names."""
    model = model_words(options.model)
    sizes = [f"--tokens {options.tokens}", f"--group {options.group}"]
    return ["benchmarks.quality.layer_similarity", *model, f"--text {options.text.name}", *sizes, f"--json {options.json.name}"]


def page(report: SimilarityReport, file: pathlib.Path) -> str:
    """Render cosines and ranges of every pair, and their means."""
    said = (
        f"Model: {report.model}, the first {report.tokens} tokens of {report.text}, exact. Each layer with the one before it. Ranges are "
        f"of groups of {report.group} channels of a token: that of the difference over that of the layer's own rows."
    )
    parts = [*head(report, file, said), f"![similarity by layer]({file.stem}.png)"]
    for title, field in (("Cosine", "cosines"), ("Range of the difference, relative", "ranges")):
        found = np.asarray([getattr(pair, field) for pair in report.pairs])
        lines = [("mean", *(f"{v:.2f}" for v in found.mean(axis=0)))]
        lines += [(str(pair.layer), *(f"{v:.2f}" for v in values)) for pair, values in zip(report.pairs, found, strict=True)]
        parts.append(table((f"{title}: layer", *report.kinds), lines))
    return "\n\n".join(parts)


def draw(report: SimilarityReport) -> Any:
    """Draw a figure: cosines on the left, ranges on the right, by layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    layers = [pair.layer for pair in report.pairs]
    for axis, field, label in zip(axes, ("cosines", "ranges"), ("cosine", "range of the difference, relative"), strict=True):
        for i, kind in enumerate(report.kinds):
            axis.plot(layers, [getattr(pair, field)[i] for pair in report.pairs], marker="o", markersize=3, label=kind)
        axis.set(xlabel="layer", ylabel=f"{label}, to the layer before")
        axis.grid(alpha=0.3)
    axes[1].axhline(1, color="grey", linewidth=0.8)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{report.model}: {report.tokens} tokens of {report.text}")
    figure.tight_layout()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("benchmarks.quality.layer_similarity", __doc__, plot=True)
    parser.add_argument("--text", metavar="FILE", type=pathlib.Path, required=True, help="the text that the model reads")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of it")
    parser.add_argument("--group", type=int, default=64, help="channels of a token that share a range")
    run_study(parser, argv, run, draw)


if __name__ == "__main__":
    main()
