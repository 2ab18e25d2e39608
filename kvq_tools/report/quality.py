"""Draw the quality of predictions: against size, by position, and the places of top-1 flips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvq_tools.evaluation.intervals import EACH
from kvq_tools.report.drawing import (
    HALF,
    WIDE,
    PagePicture,
    Theme,
    as_text,
    figure,
    label,
    legend_below,
    line_of,
    plain,
    size_unit,
)
from kvq_tools.report.schema import CacheReport
from kvq_tools.report.verdict import MIN_KL, Choice, WindowSizes, front, sentence

EXACT = "model without a cache"
FLIP_COLUMNS = 160
BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


def front_by(report: CacheReport, loss: str) -> tuple[bool, ...]:
    """Mark the caches on the front of stored bits per element against `kl` or `perplexity`."""
    return front([(c.bits_per_element, getattr(c, loss)) for c in report.caches])


def verdict(report: CacheReport) -> str:
    """Return a sentence that recommends caches, if the windows of the text can tell."""
    return sentence(
        [
            Choice(
                name=c.name,
                bits=c.bits_per_element,
                kl=c.kl,
                numbers=f"KL {c.kl or 0:.2g}, {c.agreement:.0%} of likeliest tokens kept",
                windows=WindowSizes(c.sink, c.recent, c.quantized_tokens / report.request.capacity),
                window_kl=c.window_kl,
            )
            for c in report.caches
        ]
    )


def advice(report: CacheReport) -> str:
    """Return the recommendation, what its intervals leave out, and a warning about meaningless
    numbers."""
    parts = verdict(report), certainty(report), warning(report)
    return " ".join(text for text in parts if text)


def certainty(report: CacheReport) -> str:
    """Return a sentence about what the intervals behind the recommendation leave out."""
    window, stride = report.request.window, report.request.stride
    if stride == window or report.text.tokens <= window:
        return f"{EACH}."
    return (
        f"{EACH}, and taken as if windows were independent, though neighbours share"
        f" {window - stride} tokens."
    )


def warning(report: CacheReport) -> str:
    """Return a sentence about the caches of which nothing was read quantized, so that their numbers
    are meaningless, or an empty text if there are none."""
    none = [c.name for c in report.caches if not c.quantized_tokens and c.spec != "dense"]
    if not none:
        return ""
    are = "is the full-precision model" if len(none) == 1 else "are the full-precision model"
    return (
        f"NOT ONE token was read quantized through {', '.join(none)}: what is measured there {are},"
        f" for its full-precision windows hold all of the {report.request.capacity} tokens."
    )


def pareto_kl(report: CacheReport) -> PagePicture:
    """Draw mean KL(p || q) in nats against stored bits per element, both on log scales."""
    shown = [c for c in report.caches if c.kl is not None]
    seen = [max(c.kl or 0, 0) for c in shown if (c.kl or 0) > MIN_KL]
    floor = 10 ** math.floor(math.log10(min(seen, default=1e-3)) - 0.3)

    def draw(theme: Theme) -> Any:
        return _pareto(report, theme, "kl", "mean KL(p || q), nats", floor, None)

    note = (
        " A point on the lower edge is below the scale: its predictions are those of the"
        " full-precision model."
        if len(seen) < len(shown)
        else ""
    )
    return PagePicture(
        name="pareto_kl",
        title="KL against size",
        reading=(
            "Lower and further left is better: a lower point predicts more like the model without a"
            " cache, a point further left stores fewer bits. Filled points, joined by the line, are"
            " the front: no other cache is both smaller and closer."
        )
        + note,
        alt=_pareto_alt(report, "kl", "KL to full precision"),
        wide=False,
        draw=draw,
    )


def pareto_perplexity(report: CacheReport) -> PagePicture:
    """Draw perplexity, exp(mean -log q), against stored bits per element, both on log scales."""

    def draw(theme: Theme) -> Any:
        return _pareto(
            report, theme, "perplexity", "perplexity of the text", 0, report.exact.perplexity
        )

    return PagePicture(
        name="pareto_perplexity",
        title="Perplexity against size",
        reading=(
            "Lower and further left is better; filled points are the front. The dashed line is the"
            " model without a cache. A cache may end below it by chance: KL, not perplexity, says"
            " how far predictions moved."
        ),
        alt=_pareto_alt(report, "perplexity", "perplexity")
        + f" The model without a cache has {as_text(report.exact.perplexity)}.",
        wide=False,
        draw=draw,
    )


def _pareto(
    report: CacheReport, theme: Theme, loss: str, name: str, floor: float, reference: float | None
) -> Any:
    """Draw the points, their front and a legend. floor: the lower edge; smaller values are drawn on
    it."""

    def shown(value: float) -> float:
        return max(value, floor)

    points = [
        (n, c, getattr(c, loss))
        for n, c in enumerate(report.caches, 1)
        if getattr(c, loss) is not None
    ]
    drawn = figure(HALF, 4.0 + 0.17 * math.ceil(len(points) / 2))
    axes = drawn.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    on_front = front_by(report, loss)
    line = sorted((c.bits_per_element, shown(value)) for n, c, value in points if on_front[n - 1])
    if line:
        axes.plot(*zip(*line, strict=True), color=theme["muted"], linewidth=1, zorder=1)
    for n, c, value in points:
        style = line_of(theme, n, c)
        face = style["color"] if on_front[n - 1] else theme["paper"]
        axes.plot(
            c.bits_per_element,
            shown(value),
            style["marker"],
            label=label(n, c.name, c.bits_per_element),
            color=style["color"],
            markerfacecolor=face,
            markersize=6,
            zorder=3,
            clip_on=False,
        )
    if reference is not None:
        axes.axhline(reference, color=theme["muted"], linestyle="--", linewidth=1, zorder=1)
    bits = [c.bits_per_element for _, c, _ in points] or [1.0]
    axes.set_xlim(min(bits) / 1.15, max(bits) * 1.15)
    low, high = axes.get_ylim()
    low = max(low, floor)
    axes.set_ylim(low if low == floor else low / (high / low) ** 0.06, high * (high / low) ** 0.06)
    ticks = [b for b in BITS if min(bits) / 1.15 <= b <= max(bits) * 1.15]
    axes.set_xticks(ticks, [str(b) for b in ticks])
    axes.set(xlabel="stored bits per element of keys and values, windows included", ylabel=name)
    _plain_ticks(axes)
    _bytes_above(report, axes, ticks)
    legend_below(drawn, axes)
    return drawn


def _bytes_above(report: CacheReport, axes: Any, ticks: Sequence[float]) -> None:
    """Add the same scale in bytes of a whole cache."""
    elements = report.request.bf16_bytes / 2
    unit, name = size_unit(max(ticks, default=1) * elements / 8)
    per_bit = elements / 8 / unit
    above = axes.secondary_xaxis(
        "top", functions=(lambda bits: bits * per_bit, lambda size: size / per_bit)
    )
    sizes = [t * per_bit for t in ticks]
    above.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    above.minorticks_off()
    above.set_xlabel(f"cache of {report.request.capacity} tokens, {name}")


def _plain_ticks(axes: Any) -> None:
    """Label axes with numbers rather than powers of ten, and with several of them if a log scale
    spans little more than a decade."""
    from matplotlib import ticker

    axes.xaxis.set_minor_locator(ticker.NullLocator())
    plain(axes.yaxis)
    low, high = axes.get_ylim()
    if high / low < 20:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.set_ylim(low, high)


def _pareto_alt(report: CacheReport, loss: str, name: str) -> str:
    marks = front_by(report, loss)
    each = [
        f"{c.name} {c.bits_per_element:.2f} bits, {as_text(getattr(c, loss))}"
        for c in report.caches
    ]
    return (
        f"Scatter plot of {name} against stored bits per element. {'; '.join(each)}. On the front:"
        f" {', '.join(c.name for c, on in zip(report.caches, marks, strict=True) if on) or 'none'}."
    )


def by_position(report: CacheReport) -> tuple[PagePicture, PagePicture]:
    """Draw perplexity and KL in nats over the parts of the window with scored tokens."""
    scored = [i for i, part in enumerate(report.positions) if part.tokens]
    parts = [report.positions[i] for i in scored]
    span = (
        f"positions {parts[0].first}-{parts[0].last} to {parts[-1].first}-{parts[-1].last}"
        if parts
        else "no positions"
    )
    return _perplexity_by_position(report, scored, span), _kl_by_position(report, scored, span)


def _lines(
    report: CacheReport,
    scored: Sequence[int],
    name: str,
    rows: Sequence[tuple[str, dict[str, Any], Sequence[float | None]]],
) -> Any:
    """Return a figure with a line for each row, over the parts of the window in `scored`."""
    parts = [report.positions[i] for i in scored]
    drawn = figure(HALF, 3.1 + 0.17 * math.ceil(len(rows) / 2))
    axes = drawn.subplots()
    centers = [(part.first + part.last) / 2 for part in parts]
    for text, style, values in rows:
        # None becomes nan: a gap
        axes.plot(centers, np.array([values[i] for i in scored], float), label=text, **style)
    names = [f"{part.first}-{part.last}" for part in parts]
    axes.set_xticks(centers, names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yscale("log")
    axes.set(xlabel="tokens before the predicted one, in its window", ylabel=name)
    _plain_ticks(axes)
    legend_below(drawn, axes)
    return drawn


def _perplexity_by_position(report: CacheReport, scored: Sequence[int], span: str) -> PagePicture:
    def draw(theme: Theme) -> Any:
        reference = (
            EXACT,
            {"color": theme["ink"], "linewidth": 2.4, "alpha": 0.45},
            _exp(report.exact.nats),
        )
        rows = [
            (label(n, c.name, c.bits_per_element), line_of(theme, n, c), _exp(c.nats))
            for n, c in enumerate(report.caches, 1)
        ]
        return _lines(report, scored, "perplexity", [reference, *rows])

    return PagePicture(
        name="position_perplexity",
        title="Perplexity by position",
        reading=(
            "Each point is a part of the window. The wide line is the model without a cache; "
            "a cache that leaves it towards the right loses quality as the context grows."
        ),
        alt=(
            f"Line plot of perplexity over {span} of the window for the full-precision model"
            f" and {len(report.caches)} caches."
        ),
        wide=False,
        draw=draw,
    )


def _kl_by_position(report: CacheReport, scored: Sequence[int], span: str) -> PagePicture:
    def draw(theme: Theme) -> Any:
        rows = [
            (
                label(n, c.name, c.bits_per_element),
                line_of(theme, n, c),
                [v if v is not None and v > MIN_KL else None for v in c.kl_by_position],
            )
            for n, c in enumerate(report.caches, 1)
            if (c.kl or 0) > MIN_KL
        ]
        return _lines(report, scored, "mean KL(p || q), nats", rows)

    hidden = [c.name for c in report.caches if (c.kl or 0) <= MIN_KL]
    return PagePicture(
        name="position_kl",
        title="KL by position",
        reading=(
            "Lower is better; a line that rises means that errors grow with the number of"
            " quantized tokens. Near the left a cache may still hold every token exactly."
        )
        + (f" Not shown, for it is 0: {', '.join(hidden)}." if hidden else ""),
        alt=f"Line plot of KL over {span} of the window. "
        + "; ".join(
            f"{c.name} ends at {as_text(c.kl_by_position[scored[-1]] if scored else None)}"
            for c in report.caches
        )
        + ".",
        wide=False,
        draw=draw,
    )


def flips(report: CacheReport) -> PagePicture:
    """Draw the flips in equal parts of the text, so that a long text takes as much room as a short
    one."""
    width = max(1, math.ceil(report.text.tokens / FLIP_COLUMNS))
    edges = np.arange(0, report.text.tokens + width, width)
    counts = [np.histogram(c.flips, edges)[0] for c in report.caches]
    maximum = max(max(int(row.max(initial=0)) for row in counts), 1)

    def draw(theme: Theme) -> Any:
        drawn = figure(WIDE, 0.8 + 0.3 * len(report.caches))
        axes = drawn.subplots()
        axes.grid(False)
        for n, (cache, row) in enumerate(zip(report.caches, counts, strict=True), 1):
            floor = len(counts) - n
            if row.any():
                axes.stairs(
                    floor + 0.85 * row / maximum,
                    edges,
                    baseline=floor,
                    fill=True,
                    color=line_of(theme, n, cache)["color"],
                    linewidth=0,
                )
            axes.axhline(floor, color=theme["grid"], linewidth=0.8)
        rows = range(len(counts) - 1, -1, -1)
        axes.set_yticks(
            [row + 0.35 for row in rows], [label(n, c.name) for n, c in enumerate(report.caches, 1)]
        )
        totals = axes.secondary_yaxis("right")
        totals.set_yticks([row + 0.35 for row in rows], [str(len(c.flips)) for c in report.caches])
        totals.set_ylabel("flips in all")
        for side in (axes, totals):
            side.tick_params(axis="y", length=0)
            side.spines[["left" if side is axes else "right"]].set_visible(False)
        axes.set_ylim(0, len(counts))
        axes.set_xlim(0, edges[-1])
        axes.set_ylabel("flipped tokens of each cache")
        axes.set_xlabel(
            "position in the text, tokens" + (f"; a column is {width} of them" if width > 1 else "")
        )
        return drawn

    return PagePicture(
        name="flips",
        title="Where the likeliest token flips",
        reading=(
            "A row for each cache, the text from left to right; a column's height is the number of"
            " tokens there whose likeliest successor is not that of the model without a cache, at"
            f" most {maximum}. Columns that stand in every row are likely places where the model"
            " was undecided."
        ),
        alt="Strips of the text in which the likeliest token changed. "
        + "; ".join(f"{c.name}: {len(c.flips)} of {report.text.scored}" for c in report.caches)
        + ".",
        wide=True,
        draw=draw,
    )


def _exp(nats: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else math.exp(min(value, 700)) for value in nats]
