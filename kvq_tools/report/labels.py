"""Names beside points, where they cover neither each other nor the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# in points: from the marker to the nearest edge of its name, sideways (0: centred) and up
DIRECTIONS = ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 0.7), (1, -0.7), (-1, 0.7), (-1, -0.7), (0.4, 1), (0.4, -1), (-0.4, 1), (-0.4, -1))
OFFSETS = [(distance * s, distance * u) for distance in (6, 13, 22, 34, 48, 64) for s, u in DIRECTIONS]
LINE = 3  # pixels: how wide a line is here
NEAR = 14  # beyond, a thin line leads to the name
MARKER = 4
ON_NAME = 8  # how much worse it is to cover a name than a line
OUTSIDE = 4  # how much worse it is to be outside the axes than on something
FONT_SIZE = 8


Point = tuple[float, float]


class Box(NamedTuple):
    """In pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        wide, high = min(self.right, other.right) - max(self.left, other.left), min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(wide, 0) * max(high, 0)

    def nearest(self, x: float, y: float) -> Point:
        """The point of the box that is nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.bottom), self.top)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def place_labels(
    drawn: Any, axes: Any, points: Sequence[Point], names: Sequence[str], colour: str, lines: Sequence[tuple[Point, Point]] = ()
) -> None:
    """Writes each name at the first of OFFSETS where it covers least: other names, markers, these lines, and what is outside the axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(drawn)
    drawn.draw_without_rendering()  # settles the layout
    pixel = drawn.dpi / 72
    frame = Box(*axes.get_window_extent().extents)
    at = [tuple(map(float, axes.transData.transform(point))) for point in points]
    taken = [Box(x - MARKER * pixel, y - MARKER * pixel, x + MARKER * pixel, y + MARKER * pixel) for x, y in at]
    taken += [dot for start, end in lines for dot in _dots(axes.transData.transform(start), axes.transData.transform(end))]
    named: list[Box] = []
    for (x, y), point, name in sorted(zip(at, points, names, strict=True)):  # from left to right
        measured = axes.text(0, 0, name, fontsize=FONT_SIZE, in_layout=False)
        size = measured.get_window_extent(canvas.get_renderer())
        measured.remove()

        def box(sideways: float, up: float, x: float = x, y: float = y, size: Any = size) -> Box:
            left = x + sideways * pixel - (size.width if sideways < 0 else 0 if sideways > 0 else size.width / 2)
            bottom = y + up * pixel - (size.height if up < 0 else 0 if up > 0 else size.height / 2)
            return Box(left, bottom, left + size.width, bottom + size.height)

        boxes = [box(*offset) for offset in OFFSETS]
        leaders = [_dots((x, y), own.nearest(x, y)) if _is_far(offset) else [] for own, offset in zip(boxes, OFFSETS, strict=True)]
        costs = []
        for own, leader in zip(boxes, leaders, strict=True):
            covered = sum(part.overlap(name) for part in (own, *leader) for name in named)
            costs.append(sum(map(own.overlap, taken)) + ON_NAME * covered + OUTSIDE * (own.area - own.overlap(frame)))
        best = costs.index(min(costs))
        named.append(boxes[best])
        taken += leaders[best]
        sideways, up = OFFSETS[best]
        axes.annotate(
            name,
            point,
            (sideways, up),
            textcoords="offset points",
            ha="right" if sideways < 0 else "left" if sideways > 0 else "center",
            va="top" if up < 0 else "bottom" if up > 0 else "center",
            fontsize=FONT_SIZE,
            color=colour,
            in_layout=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
            if _is_far(OFFSETS[best])
            else None,
        )


def _is_far(offset: Point) -> bool:
    return max(map(abs, offset)) > NEAR


def _dots(start: Any, end: Any) -> list[Box]:
    """Small boxes along a line."""
    steps = max(int(math.dist(start, end) / LINE), 1)
    found = []
    for i in range(steps + 1):
        x, y = (float(a + (b - a) * i / steps) for a, b in zip(start, end, strict=True))
        found.append(Box(x - LINE / 2, y - LINE / 2, x + LINE / 2, y + LINE / 2))
    return found
