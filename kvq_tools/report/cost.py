"""Draw the cost of a cache: its bytes by layer, and the time of a decode step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvq_tools.report import drawing
from kvq_tools.report.schema import ArrayBytes, CacheReport

SIDES = {"k": ("keys", "s0"), "v": ("values", "s1"), "kv": ("keys and values", "s2")}
KINDS = {
    "codes": 1.0,
    "unquantized rows": 0.85,
    "scales and zero points": 0.62,
    "outliers": 0.5,
    "prompt statistics": 0.38,
    "windows": 0.2,
}


def sizes(report: CacheReport) -> drawing.PagePicture:
    layers, caches = report.model.layers, report.caches
    stacks = [[grouped(layer) for layer in c.sizes] for c in caches]
    parts = [
        (side, kind)
        for side in SIDES
        for kind in KINDS
        if any((side, kind) in layer for stack in stacks for layer in stack)
    ]
    unit, name = drawing.size_unit(max(sum(layer.values()) for stack in stacks for layer in stack))
    columns = min(5, len(caches))

    def draw(theme: drawing.Theme) -> Any:
        from matplotlib.patches import Patch

        rows = math.ceil(len(caches) / columns)
        drawn = drawing.figure(drawing.WIDE, 0.9 + 1.75 * rows)
        grid = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for number, (cache, stack, axes) in enumerate(
            zip(caches, stacks, grid.flat, strict=False), 1
        ):
            axes.grid(axis="x", visible=False)
            floor = np.zeros(layers)
            for side, kind in parts:
                height = np.array([layer.get((side, kind), 0) / unit for layer in stack])
                if not height.any():
                    continue
                axes.bar(
                    range(layers),
                    height,
                    0.86,
                    floor,
                    color=theme[SIDES[side][1]],
                    alpha=KINDS[kind],
                    linewidth=0,
                )
                floor += height
            axes.set_title(drawing.label(number, cache.name))
            axes.set_xticks(drawing.few(layers))
            axes.set_xlim(-0.6, layers - 0.4)
        for axes in list(grid.flat)[len(caches) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{name} of a layer")
        for number, axes in enumerate(grid.flat):
            last = number + columns >= len(caches)
            axes.tick_params(labelbottom=last)
            axes.set_xlabel("layer" if last else "")
        patches = [
            Patch(
                color=theme[SIDES[s][1]], alpha=KINDS[k], linewidth=0, label=f"{SIDES[s][0]}: {k}"
            )
            for s, k in parts
        ]
        drawn.legend(
            handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=8
        )
        return drawn

    return drawing.PagePicture(
        name="sizes",
        title=f"What a cache of {report.request.capacity} tokens is made of, layer by layer",
        reading=(
            "One panel for each cache, one bar for each layer, all on the same scale; the colours"
            " of a bar are its parts, from the bottom: keys, then values (or what holds both)."
            " Windows, which hold tokens in full precision, and prompt statistics do not grow with"
            " the context; the rest does."
        ),
        alt="Stacked bars of bytes by layer and part. "
        + "; ".join(f"{c.name}: {c.bytes} bytes in all" for c in caches)
        + ".",
        wide=True,
        draw=draw,
    )


def kind_of(name: str) -> str:
    """Return the purpose of a cache's array."""
    if name in ("ring", "sink"):
        return "windows"
    if name == "stats":
        return "prompt statistics"
    if name.endswith(("scale", "zero")):
        return "scales and zero points"
    return {"outliers": "outliers", "rows": "unquantized rows"}.get(name, "codes")


def grouped(layer: Sequence[ArrayBytes]) -> dict[tuple[str, str], int]:
    """Add up a layer's bytes by side and kind."""
    totals: dict[tuple[str, str], int] = {}
    for part in layer:
        key = part.side, kind_of(part.name)
        totals[key] = totals.get(key, 0) + part.bytes
    return totals


def speed(report: CacheReport) -> drawing.PagePicture | None:
    """Draw the fastest decode step in ms against the context in tokens. Return None if none was
    timed."""
    measured = report.speed
    if measured is None:
        return None
    numbers = {c.name: n for n, c in enumerate(report.caches, 1)}

    def draw(theme: drawing.Theme) -> Any:
        drawn = drawing.figure(drawing.HALF, 3.1 + 0.17 * math.ceil(len(measured.caches) / 2))
        axes = drawn.subplots()
        for cache in measured.caches:
            number = numbers.get(cache.name)
            text = (
                drawing.label(number, cache.name)
                if number
                else f"{drawing.literal(cache.name)} (reference)"
            )
            axes.plot(
                measured.contexts,
                cache.fastest_ms,
                label=text,
                **drawing.line_of(theme, number or 1, cache),
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(measured.contexts, [str(n) for n in measured.contexts])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="context, tokens", ylabel="decode step of one token, ms")
        axes.minorticks_off()
        drawing.legend_below(drawn, axes)
        return drawn

    return drawing.PagePicture(
        name="speed",
        title="Time of a decode step against context",
        reading=(
            f"Lower is better; each point is the fastest of {len(measured.caches[0].samples_ms[0])}"
            " steps through the whole model, one sequence: what else the machine does only adds to"
            " it, and so does quantizing an aged block, in few steps. How steeply a line rises is"
            " what each further token in the cache costs."
        ),
        alt=(
            "Line plot of milliseconds for a decode step at contexts"
            f" {', '.join(map(str, measured.contexts))}. "
        )
        + "; ".join(
            f"{c.name}: {', '.join(f'{t:.3g}' for t in c.fastest_ms)} ms" for c in measured.caches
        )
        + ".",
        wide=False,
        draw=draw,
    )
