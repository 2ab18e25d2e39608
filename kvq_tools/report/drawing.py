"""How a picture is drawn: once for the page, as SVG whose colours are the page's CSS variables, and once as a PNG on white.

A picture is a function from a theme to a matplotlib figure. matplotlib knows no CSS variables, so the page's theme draws with made-up
colours that stand for them, and these are replaced in the SVG; that is how one drawing is legible in light and in dark. Maps inside an
SVG are pixels, and stay as they are.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvq_tools.report.schema import CacheNumbers, StepTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF, WIDE = 4.8, 9.6  # inches
PNG_DPI = 160
PALETTE = 256  # colours
NAME_LENGTH = 26  # of a cache's name in a picture

# light and dark values of each CSS variable; the series' colours follow each other so that neighbours differ in hue and in lightness
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
SERIES = tuple(name for name in COLOURS if re.fullmatch(r"s\d", name))
MARKERS = "os^Dv<>PX*"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))

_STAND_IN = {name: f"#01fe{i:02x}" for i, name in enumerate(COLOURS)}  # colours that nothing else has
_PATH = re.compile(r' d="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")  # beyond hundredths of a point
_FONT = re.compile(r"'DejaVu Sans'[^;\"]*")
_PIXELS = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)")


@dataclasses.dataclass(frozen=True)
class Theme:
    """A colour for every name of COLOURS."""

    colours: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.colours[name]


PAGE = Theme(_STAND_IN)
LIGHT = Theme({name: light for name, (light, _) in COLOURS.items()})

Draw = Callable[[Theme], "Figure"]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of the page and a PNG beside it. reading: how to read it, in a sentence or two; alt: what it shows, in words."""

    name: str
    title: str
    reading: str
    alt: str
    wide: bool
    draw: Draw

    @functools.cached_property
    def svg(self) -> str:
        """For inclusion in HTML: no namespaces, no metadata, identifiers of its own."""
        with _style(PAGE, self.name):
            text = _saved(self.draw(PAGE), "svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None}).decode("utf-8")
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img" aria-hidden="true">', text, count=1)
        text = re.sub(r">\s+<", "><", text.replace("xlink:href=", "href="))
        text = _PATH.sub(lambda found: _DIGITS.sub(r"\1", " ".join(found[0].split()).join((" ", ""))), text)
        pointed = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
        text = re.sub(r'\sid="([^"]*)"', lambda found: f' id="{self.name}-{found[1]}"' if found[1] in pointed else "", text)
        text = re.sub(r'(url\(#|href="#)', rf"\1{self.name}-", text)
        text = _PIXELS.sub(lambda found: f"data:image/png;base64,{_base64(optimized(base64.b64decode(found[1])))}", text)
        for name, stand_in in _STAND_IN.items():
            text = text.replace(stand_in, f"var(--{name})")
        return _FONT.sub("var(--font)", text)

    @functools.cached_property
    def png(self) -> bytes:
        with _style(LIGHT, self.name):
            return optimized(_saved(self.draw(LIGHT), "png", dpi=PNG_DPI))


def optimized(png: bytes) -> bytes:
    """The same opaque picture with a palette that covers all its colours, not only the frequent ones; a third of the size."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        opaque = image.convert("RGB")
    small, out = opaque.quantize(PALETTE, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE), io.BytesIO()
    small.save(out, "png", optimize=True)
    return out.getvalue()


def figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label(number: int, name: str) -> str:
    """A cache in a picture: its number tells it apart where its name had to be cut."""
    return f"{number} {name}" if len(name) <= NAME_LENGTH else f"{number} {name[: NAME_LENGTH - 1]}…"


def line_of(theme: Theme, number: int, cache: CacheNumbers | StepTimes) -> dict[str, Any]:
    """How a cache's line looks in every picture; numbers begin with 1. The dense cache is the reference."""
    if cache.spec == "dense":
        return {"color": theme["muted"], "marker": MARKERS[0], "linestyle": DASHES[1]}
    index = number - 1
    dash = DASHES[index // len(SERIES) % len(DASHES)]
    return {"color": theme[SERIES[index % len(SERIES)]], "marker": MARKERS[index % len(MARKERS)], "linestyle": dash}


def legend_below(drawn: Figure, axes: Any, columns: int = 2) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        drawn.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def few(count: int, most: int = 6) -> list[int]:
    """At most `most` of 0 .. count - 1 for ticks: 0 and multiples of a round number."""
    step = next(step for power in itertools.count() for n in (1, 2, 5) if (step := n * 10**power) * most >= count)
    return list(range(0, count, step))


def plain(ticks: Any) -> None:
    """Numbers rather than powers of ten on an axis."""
    from matplotlib import ticker

    ticks.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))


def size_unit(largest: float) -> tuple[float, str]:
    """Bytes of the unit in which `largest` bytes are a number of few digits, and its name."""
    power = min(int(math.log(max(largest, 1), 1024)), 4)
    return 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def told(value: float | None) -> str:
    """A number in a sentence."""
    return "no finite number" if value is None else f"{value:.4g}"


@contextlib.contextmanager
def _style(theme: Theme, salt: str) -> Iterator[None]:
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
        "figure.facecolor": "none" if theme is PAGE else theme["paper"],
        "lines.linewidth": 1.4,
        "lines.markersize": 4,
        "savefig.facecolor": "auto",
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": ["DejaVu Sans"],  # as wide as any that a reader may have in its place
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def _saved(drawn: Figure, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    drawn.savefig(out, format=kind, **options)
    return out.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
