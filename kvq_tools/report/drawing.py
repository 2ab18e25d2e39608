"""Draw pictures as PNGs, in a light and in a dark theme.

A picture is a function from a theme to a matplotlib figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvq_tools.report.schema import CacheNumbers, StepTimes

if TYPE_CHECKING:  # matplotlib is optional, and only `kvq report` waits for it
    from matplotlib.figure import Figure

HALF, WIDE = 4.8, 9.6  # inches
DPI = 160
PALETTE = 256  # colours of a PNG
NAME_LENGTH = 26  # characters of a cache's name in a picture
LEGEND_LENGTH = 22  # characters if its bits follow

# light and dark values of the pictures and the page's CSS. Neighbouring series differ in hue and
# lightness.
COLOURS = {
    "ink": ("#1c2330", "#e8eaf0"),
    "muted": ("#5b6575", "#a3acba"),
    "grid": ("#dfe3ea", "#343b47"),
    "paper": ("#ffffff", "#171b22"),
    "s0": ("#2f6fd0", "#6fa8ff"),
    "s1": ("#d0521b", "#ff9a5c"),
    "s2": ("#1d8a4e", "#4fcf8a"),
    "s3": ("#9c36b5", "#d98cf0"),
    "s4": ("#b08900", "#e6c34a"),
    "s5": ("#c2255c", "#ff7aa8"),
    "s6": ("#0c8599", "#4fd0e0"),
    "s7": ("#6b4f3a", "#cfa98a"),
    "s8": ("#5f3dc4", "#a99bff"),
    "s9": ("#5c940d", "#a5d84f"),
}
SERIES = tuple(name for name in COLOURS if name.startswith("s"))
MARKERS = "os^Dv<>PX*"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))

Theme = dict[str, str]  # a colour for every name of COLOURS
LIGHT: Theme = {name: light for name, (light, _) in COLOURS.items()}
DARK: Theme = {name: dark for name, (_, dark) in COLOURS.items()}

Draw = Callable[[Theme], "Figure"]


@dataclasses.dataclass(frozen=True)
class PagePicture:
    """A picture of the page; its light PNG is also written beside the page.

    reading: explains it in a sentence or two. alt: describes it for readers who cannot see it.
    """

    name: str
    title: str
    reading: str
    alt: str
    wide: bool
    draw: Draw

    @functools.cached_property
    def light(self) -> bytes:
        return self._png(LIGHT)

    @functools.cached_property
    def dark(self) -> bytes:
        return self._png(DARK)

    def _png(self, theme: Theme) -> bytes:
        out = io.BytesIO()
        with _style(theme):
            self.draw(theme).savefig(out, format="png", dpi=DPI)
        return optimized(out.getvalue())


def optimized(png: bytes) -> bytes:
    """Return the opaque picture with a palette that covers rare colours too, at a third of the
    size."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        opaque = image.convert("RGB")
    small = opaque.quantize(PALETTE, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    out = io.BytesIO()
    small.save(out, "png", optimize=True)
    return out.getvalue()


def figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label(number: int, name: str, bits: float | None = None) -> str:
    """Return the name of a cache in a picture, with its stored bits per element if given: a name
    may leave them to the default, and a shortened one may lose them. The number tells caches with
    shortened names apart. A $ does not begin a formula.
    """
    maximum = NAME_LENGTH if bits is None else LEGEND_LENGTH
    short = name if len(name) <= maximum else f"{name[: maximum - 1]}…"
    return f"{number} {literal(short)}" + ("" if bits is None else f", {bits:.1f} bits")


def literal(text: str) -> str:
    """Return a text that matplotlib draws literally."""
    return text.replace("$", r"\$")


def line_of(theme: Theme, number: int, cache: CacheNumbers | StepTimes) -> dict[str, Any]:
    """Return the style of a cache in every picture. Numbers begin with 1. The dense cache is the
    grey reference."""
    if cache.spec == "dense":
        return {"color": theme["muted"], "marker": MARKERS[0], "linestyle": DASHES[1]}
    turn, place = divmod(number - 1, len(SERIES))
    return {
        "color": theme[SERIES[place]],
        "marker": MARKERS[(number - 1) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


def legend_below(drawn: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        drawn.legend(
            handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8
        )


def few(count: int, maximum: int = 6) -> list[int]:
    """Return at most `maximum` ticks of 0 .. count - 1: 0 and multiples of a round number."""
    step = next(
        step
        for power in itertools.count()
        for n in (1, 2, 5)
        if (step := n * 10**power) * maximum >= count
    )
    return list(range(0, count, step))


def plain(ticks: Any) -> None:
    """Label an axis with numbers rather than powers of ten."""
    from matplotlib import ticker

    ticks.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))


def size_unit(largest: float) -> tuple[float, str]:
    """Return (bytes, name) of the unit in which `largest` bytes have few digits."""
    power = min(int(math.log(max(largest, 1), 1024)), 4)
    return 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def as_text(value: float | None) -> str:
    """Return a number as text for a sentence."""
    return "no finite number" if value is None else f"{value:.4g}"


@contextlib.contextmanager
def _style(theme: Theme) -> Iterator[None]:
    import matplotlib

    ink, muted = theme["ink"], theme["muted"]
    settings: Any = {
        "font.size": 8.5,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8.5,
        "axes.facecolor": "none",
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme["grid"],
        "grid.linewidth": 0.6,
        "text.color": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "legend.labelcolor": ink,
        "figure.facecolor": theme["paper"],
        "lines.linewidth": 1.4,
        "lines.markersize": 4,
        "savefig.facecolor": "auto",
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield
