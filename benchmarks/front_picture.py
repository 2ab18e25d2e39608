"""Draw KL over resident bytes of every measured cache: docs/front.svg, the README's picture, and
one for each other model beside its results.

`python -m benchmarks.results_page` writes them from the rows of the protocol. Colours follow the
reader's light or dark theme. A number is drawn with its 95 % interval.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks import llama_8b
from kvq_tools.evaluation.intervals import Interval

FILE = pathlib.Path(__file__).parents[1] / "docs" / "front.svg"
WIDTH, HEIGHT = 800, 500
LEFT, RIGHT, TOP, BOTTOM = 70, 780, 56, 424  # of the plot
SIZES = 0.13, 4.6  # GiB at its sides, with room for names on the left
KL = 0.0003, 0.35  # nats at its bottom and top
GAP = 17  # least pixels between labels
COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#d1d9e0", "#30363d"),
    "other": ("#8b949e", "#7d8590"),
    "front": ("#0969da", "#58a6ff"),
}  # in a light and in a dark theme


@dataclasses.dataclass(frozen=True)
class Point:
    """A cache: resident GiB for one sequence of 32K tokens of an 8B model, and KL in nats."""

    name: str
    gib: float
    kl: float
    interval: Interval


def front(candidates: Sequence[Point]) -> list[Point]:
    """Return the points to which no other point is at least equal in both size and KL."""
    return [
        point
        for point in candidates
        if not any(
            other.gib <= point.gib and other.kl <= point.kl and other != point
            for other in candidates
        )
    ]


def picture(candidates: Sequence[Point], subject: str, windows: int, sample: str) -> str:
    """Render the SVG. subject: the model, its texts and how they are read. Intervals are over so
    many windows of `sample`."""
    inside = [point for point in candidates if point.kl < KL[1]]
    beyond = [point for point in candidates if point.kl >= KL[1]]
    best = front(inside)
    parts = [*_head(subject), *_axes()]
    parts += [_beyond(point) for point in beyond]
    parts += [_mark(point, "other", 2.5) for point in inside if point not in best]
    parts += [_mark(point, "front", 4.5) for point in best]
    parts += _labels(best)
    note = f"95 % intervals over {windows} windows of {sample}; paired ratios tell more apart"
    if beyond:
        note += f"; {len(beyond)} beyond the top"
    parts += [_text(LEFT, HEIGHT - 12, note, 12, "ink"), "</svg>"]
    return "\n".join(parts) + "\n"


def _head(subject: str) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="system-ui, sans-serif" role="img" aria-label="KL to full precision over'
        ' resident bytes, every measured cache; the caches of the front are named">'
    )
    yield "<style>"
    for theme, (begin, end) in enumerate(
        (("", ""), ("@media (prefers-color-scheme: dark) {", "}"))
    ):
        rules = " ".join(
            f".{name} {{ fill: {both[theme]}; }} .{name}-line {{ stroke: {both[theme]}; }}"
            for name, both in COLOURS.items()
        )
        yield f"{begin} {rules} {end}".strip()
    yield "text { paint-order: stroke; stroke-width: 3; } </style>"
    yield f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
    title = f"A cache of 32K tokens of {llama_8b.NAME}: 4 GiB in bfloat16, and quantized"
    yield _text(LEFT, 24, title, 15, "ink")
    yield _text(LEFT, 44, f"KL to full precision in nats per token, {subject}", 12, "ink")


def _axes() -> Iterator[str]:
    for gib in (0.25, 0.5, 1, 2, 4):
        yield _line(_x(gib), TOP, _x(gib), BOTTOM, "faint")
        yield _text(_x(gib), BOTTOM + 18, f"{gib:g} GiB", 12, "ink", "middle")
    for kl in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3):
        yield _line(LEFT, _y(kl), RIGHT, _y(kl), "faint")
        yield _text(LEFT - 8, _y(kl) + 4, f"{kl:g}", 12, "ink", "end")
    yield _text(_x(4) - 8, BOTTOM - 8, "bfloat16: 4 GiB, KL 0", 12, "ink", "end")
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 36, "resident, one sequence", 12, "ink", "middle")


def _mark(point: Point, kind: str, radius: float) -> str:
    low, high = (min(max(kl, KL[0]), KL[1]) for kl in point.interval)
    x = _x(point.gib)
    bar = _line(x, _y(low), x, _y(high), kind)
    circle = f'<circle class="{kind}" cx="{x:.1f}" cy="{_y(point.kl):.1f}" r="{radius}">'
    return f"{bar}{circle}<title>{escape(point.name)}</title></circle>"


def _beyond(point: Point) -> str:
    """Return a triangle at the top for a point above the plot."""
    x = _x(point.gib)
    return (
        f'<path class="other" d="M{x - 4:.1f} {TOP + 7} L{x + 4:.1f} {TOP + 7} L{x:.1f} {TOP} Z">'
        f"<title>{escape(point.name)}: KL {point.kl:.2g}</title></path>"
    )


def _labels(best: Sequence[Point]) -> Iterator[str]:
    """Yield the names of the front's points, which descend to the right, each left of its point and
    below the one before."""
    lowest = -math.inf
    for point in best:
        lowest = max(_y(point.kl) + 4, lowest + GAP)
        yield _text(_x(point.gib) - 9, lowest, point.name, 12, "ink", "end")


def _x(gib: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(gib / SIZES[0]) / math.log(SIZES[1] / SIZES[0])


def _y(kl: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(kl / KL[0]) / math.log(KL[1] / KL[0])


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<path class="{kind}-line" d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}"/>'


def _text(x: float, y: float, text: str, size: int, kind: str, anchor: str = "start") -> str:
    """Return a text of fixed length, so that it fits with any font, on a halo of the paper."""
    length = round(len(text) * size * 0.52)
    left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
    return (
        f'<text class="{kind} paper-line" x="{left:.1f}" y="{y:.1f}" font-size="{size}"'
        f' textLength="{length}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )
