"""Draw heat maps: magnitudes of keys and values by token and channel, and errors of each cache by
layer and channel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvq_tools.report.drawing import WIDE, PagePicture, Theme, few, figure, label, plain
from kvq_tools.report.schema import CacheReport, LayerErrors

COLUMNS = 512  # columns of a map; wider ones are pooled
SHADES = 40
DECADES = 3  # decades that a scale shows, below the largest
SIDES = ("keys", "values")


def pooled(matrix: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows fewer"]:
    """Pool a matrix to at most COLUMNS columns by the maximum of neighbours, so that outlier
    channels stay visible."""
    width = math.ceil(matrix.shape[1] / COLUMNS)
    return np.maximum.reduceat(matrix, np.arange(0, matrix.shape[1], width), axis=1)


def magnitudes(report: CacheReport) -> PagePicture:
    """Draw |k| after RoPE and |v| in the model's units, tokens x channels, for the sampled layers
    of the report."""
    layers = report.magnitudes
    matrices = [(pooled(m.keys.matrix()), pooled(m.values.matrix())) for m in layers]

    def draw(theme: Theme) -> Any:
        titles = [[f"{side} of layer {layer.layer}" for side in SIDES] for layer in layers]
        return _maps(report, theme, 1.45, matrices, titles, "token", "|{0}|")

    largest = [max(float(pair[side].max(initial=0)) for pair in matrices) for side in (0, 1)]
    return PagePicture(
        name="magnitudes",
        title="How large keys and values are",
        reading=(
            f"One row of pixels for each of the first {report.tokens_of_sample} tokens of the text,"
            " one column for each channel, the KV heads side by side; keys after RoPE. A bright"
            " column is an outlier channel: it widens every range that it shares. A bright row is"
            " an outlier token, often the first."
        )
        + _pooling(report),
        alt=(
            "Heat maps of |k| and |v| by token and channel in layers"
            f" {', '.join(str(m.layer) for m in layers)}. The largest key is {largest[0]:.3g}, the"
            f" largest value {largest[1]:.3g}."
        ),
        wide=True,
        draw=draw,
    )


def errors(report: CacheReport) -> PagePicture | None:
    """Draw the mean error of each cache by layer and channel. Return None if every cache is
    exact."""
    lossy = [any(e.k_relative or e.v_relative for e in c.errors) for c in report.caches]
    caches = list(itertools.compress(enumerate(report.caches, 1), lossy))
    exact = [c.name for c, has_errors in zip(report.caches, lossy, strict=True) if not has_errors]
    if not caches:
        return None
    matrices = [[pooled(_matrix(c.errors, side)) for side in SIDES] for _, c in caches]

    def draw(theme: Theme) -> Any:
        titles = [
            [
                f"{name}: {label(number, cache.name)}, {_relative(cache.errors, side)}"
                for side, name in enumerate(SIDES)
            ]
            for number, cache in caches
        ]
        height = 0.5 + 0.06 * min(report.model.layers, 16)
        return _maps(report, theme, height, matrices, titles, "layer", "mean |{0}^ - {0}|")

    not_shown = f" Exact, and not shown: {', '.join(exact)}." if exact else ""
    return PagePicture(
        name="errors",
        title="What quantizing every token changes",
        reading=(
            "One row of pixels for each layer, one column for each channel: the mean distance"
            " between a key or value and what the cache makes of it, over the first"
            f" {report.tokens_of_sample} tokens of the text, none kept in a full-precision window."
            " Percentages are ||x^ - x|| / ||x||, from the best layer to the worst. It shows where"
            " a method errs, not how much that costs: KL does."
        )
        + not_shown,
        alt="Heat maps of the mean error of keys and values by layer and channel. "
        + "; ".join(
            f"{c.name}: keys {_relative(c.errors, 0)}, values {_relative(c.errors, 1)}"
            for _, c in caches
        )
        + f".{not_shown}",
        wide=True,
        draw=draw,
    )


def _matrix(layers: tuple[LayerErrors, ...], side: str) -> Float[np.ndarray, "layers channels"]:
    return np.array(
        [[math.nan if v is None else v for v in getattr(layer, side)] for layer in layers]
    )


def _relative(layers: tuple[LayerErrors, ...], side: int) -> str:
    values = [
        value
        for layer in layers
        if (value := (layer.k_relative, layer.v_relative)[side]) is not None
    ]
    if not values:
        return "not finite"
    return f"{100 * min(values):.3g} to {100 * max(values):.3g} %" if max(values) else "exact"


def _norm(matrices: list[np.ndarray]) -> Any:
    """Return one logarithmic scale for all panels of a side."""
    from matplotlib.colors import LogNorm

    largest = max((float(np.nanmax(m, initial=0)) for m in matrices), default=0) or 1.0
    return LogNorm(largest / 10**DECADES, largest, clip=True)


def _shades() -> Any:
    import matplotlib

    return matplotlib.colormaps["magma"].resampled(SHADES)


def _maps(
    report: CacheReport,
    theme: Theme,
    height: float,
    matrices: Sequence[Sequence[np.ndarray]],
    titles: Sequence[Sequence[str]],
    rows: str,
    shown: str,
) -> Any:
    """Draw rows of two maps, keys on the left and values on the right.

    Args:
        height: of a map, in inches.
        matrices: (keys, values) of each row of maps.
        titles: of the maps.
        rows: what a row of pixels is.
        shown: what a colour is, with {0} for k or v.
    """
    norms = [_norm([pair[side] for pair in matrices]) for side in (0, 1)]
    drawn = figure(WIDE, 0.9 + height * len(matrices))
    grid = drawn.subplots(len(matrices), 2, squeeze=False)
    for row, pair in enumerate(matrices):
        for side, (axes, matrix) in enumerate(zip(grid[row], pair, strict=True)):
            _map(report, theme, axes, matrix, norms[side], row == len(matrices) - 1)
            axes.set_title(titles[row][side])
            axes.set_ylabel(rows if side == 0 else "")
            if row == 0:
                name = f"{shown.format(SIDES[side][0])}, in the model's units"
                _colour_bar(drawn, norms[side], grid[:, side], name)
    return drawn


def _map(
    report: CacheReport, theme: Theme, axes: Any, matrix: np.ndarray, norm: Any, last: bool
) -> None:
    """Draw a map whose columns are channels, with the KV heads marked. If all values are 0, draw no
    pixels."""
    heads, channels, rows = report.model.kv_heads, report.model.head_dim, len(matrix)
    axes.grid(False)
    extent = (0, heads * channels, rows - 0.5, -0.5)
    if np.nanmax(matrix, initial=0) > 0:
        axes.imshow(
            matrix, aspect="auto", interpolation="none", cmap=_shades(), norm=norm, extent=extent
        )
    axes.set_xlim(extent[:2])
    axes.set_ylim(extent[2:])
    marked = few(heads, 8)
    for head in range(1, heads):
        axes.axvline(head * channels, color=theme["paper"], linewidth=1.2 if heads <= 8 else 0.4)
    axes.set_xticks([(h + 0.5) * channels for h in marked], [f"head {h}" for h in marked])
    axes.set_yticks(few(rows))
    axes.tick_params(axis="x", length=0, labelbottom=last)
    axes.set_xlabel(f"channel, {channels} of each KV head" if last else "")


def _colour_bar(drawn: Any, norm: Any, axes: Any, name: str) -> None:
    from matplotlib.cm import ScalarMappable

    bar = drawn.colorbar(
        ScalarMappable(norm, _shades()),
        ax=list(axes),
        label=name,
        location="top",
        aspect=60,
        fraction=0.04,
        pad=0.01,
    )
    bar.solids.set_rasterized(True)  # as vector shapes there would be one for each shade
    bar.outline.set_visible(False)
    bar.minorticks_off()
    plain(bar.ax.xaxis)


def _pooling(report: CacheReport) -> str:
    width = math.ceil(report.model.kv_heads * report.model.head_dim / COLUMNS)
    return "" if width == 1 else f" A column of pixels is the largest of {width} channels."
