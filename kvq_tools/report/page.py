"""Write the page: one self-contained HTML file, from a report's numbers and pictures."""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jinja2

from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_tools.report import cost, heat, quality
from kvq_tools.report.drawing import DARK, LIGHT, PagePicture
from kvq_tools.report.schema import CacheReport, Speed

TEMPLATE = "page.html.jinja"
NOTHING = "–"


class PageTable(NamedTuple):
    """A table whose first column names the rows. The other columns are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class PageSection(NamedTuple):
    title: str
    text: str
    pictures: tuple[PagePicture, ...]
    table: PageTable | None = None  # beside them


def sections(report: CacheReport) -> tuple[PageSection, ...]:
    """Return the sections of the page, in their order."""
    request, speed = report.request, cost.speed(report)
    scored = (
        f"{report.text.scored} tokens, each predicted after at most {request.capacity - 1} others"
    )
    parts = [
        PageSection(
            "Quality against size",
            f"{quality.advice(report)} KL, perplexity and sizes are of the same run: {scored}, read"
            f" through the cache itself ({_mode(report)}). Sizes are of a cache of"
            f" {request.capacity} tokens; with longer contexts the full-precision windows weigh"
            " less, and a cache moves towards its body's bits (table below).",
            (quality.pareto_kl(report), quality.pareto_perplexity(report)),
        ),
        PageSection("By position", "", (*quality.by_position(report), quality.flips(report))),
        PageSection("Size", "", (cost.sizes(report),)),
    ]
    if report.speed is not None and speed is not None:
        machine = report.speed.machine
        parts.append(
            PageSection(
                "Speed",
                f"Measured on {machine.device} ({machine.cores} cores, JAX {machine.jax_version}),"
                f" in {report.model.dtype}; the machine's load average was"
                f" {' and '.join(f'{load:g}' for load in machine.load)} before and after. Times of"
                " a busy machine compare caches only roughly.",
                (speed,),
                _times(report.speed),
            )
        )
    errors = heat.errors(report)
    parts.append(
        PageSection(
            "Keys, values and errors", "", (heat.magnitudes(report), *([errors] if errors else []))
        )
    )
    return tuple(parts)


def numbers(report: CacheReport) -> PageTable:
    """Return the main table: a row for the full-precision model and one for each cache."""
    by_kl, by_perplexity = quality.front_by(report, "kl"), quality.front_by(report, "perplexity")
    rows = [
        {
            "cache": quality.EXACT,
            "perplexity": number(report.exact.perplexity, 3),
            "bits per byte": number(report.exact.bits_per_byte, 4),
            "bytes": str(report.request.bf16_bytes),
            "ratio to bf16": "1.00",
            "bits per element": "16.00",
        }
    ]
    for i, c in enumerate(report.caches):
        front = {(True, True): "both", (True, False): "KL", (False, True): "perplexity"}.get(
            (by_kl[i], by_perplexity[i]), ""
        )
        rows.append(
            {
                "cache": f"{i + 1} {c.name}",
                "front": front,
                "perplexity": number(c.perplexity, 3),
                "bits per byte": number(c.bits_per_byte, 4),
                "KL, nats": number(c.kl, 5),
                "top-1 agreement": f"{c.agreement:.2%}",
                "flips": str(len(c.flips)),
                "bytes": str(c.bytes),
                "ratio to bf16": f"{c.ratio:.2f}",
                "bits per element": f"{c.bits_per_element:.2f}",
                "body bits per element": f"{c.body_bits_per_element:.2f}",
                "parameter bytes": str(c.parameter_bytes),
                "working bytes": str(c.working_bytes),
            }
            | {f"resident bytes, batch {n}": str(c.resident_bytes(n)) for n in COMPARED_BATCHES}
            | {
                "sink, recent, block": f"{c.sink}, {c.recent}, {c.block}",
                "tokens read quantized": str(c.quantized_tokens or "NONE"),
            }
        )
    columns = tuple(rows[-1])  # of a cache
    note = (
        "bf16 rows stand for the model without a cache; resident bytes are the cache, its"
        " parameters (once for all sequences) and working memory"
    )
    cells = tuple(tuple(row.get(column, "") for column in columns) for row in rows)
    return PageTable("All numbers", columns, cells, note)


def details(report: CacheReport) -> tuple[PageTable, ...]:
    """Return the numbers behind the pictures, except maps, places of flips and single times, which
    only report.json has."""
    parts = [f"{p.first}-{p.last}" for p in report.positions]
    rows = [
        ("tokens", *(str(p.tokens) for p in report.positions)),
        (f"{quality.EXACT}: nats", *_each(report.exact.nats, 4)),
    ]
    for n, c in enumerate(report.caches, 1):
        rows.append((f"{n} {c.name}: nats", *_each(c.nats, 4)))
        rows.append((f"{n} {c.name}: KL", *_each(c.kl_by_position, 5)))
        rows.append((f"{n} {c.name}: flips", *map(str, c.flips_by_position)))
    layers = tuple(f"layer {i}" for i in range(report.model.layers))
    return (
        PageTable("By position in the window", ("tokens before", *parts), tuple(rows)),
        PageTable("Bytes by layer and part", ("cache, side, part", *layers), tuple(_sizes(report))),
        PageTable(
            "Relative errors by layer, every token quantized",
            ("cache, side", *layers),
            tuple(_errors(report)),
        ),
    )


def html(report: CacheReport, shown: Sequence[PageSection]) -> str:
    """Return the page with these sections. It refers to nothing outside itself."""
    source = importlib.resources.files("kvq_tools.report") / TEMPLATE
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(source.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        mode=_mode(report),
        sections=shown,
        table=numbers(report),
        details=details(report),
        title=title,
        uri=_uri,
        light=LIGHT,
        dark=DARK,
    )


def title(name: str) -> str:
    """Return a model's or text's name for headings: the last part of an absolute path, and all of a
    Hub id or a relative path. The command on the page has the path."""
    path = PurePath(name)
    return path.name if path.is_absolute() or name.startswith(("~", "..")) else name


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _each(values: Sequence[float | None], digits: int) -> list[str]:
    return [number(value, digits) for value in values]


def _uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _sizes(report: CacheReport) -> list[tuple[str, ...]]:
    rows = []
    for n, cache in enumerate(report.caches, 1):
        layer_bytes = [
            {(part.side, part.name): part.bytes for part in layer} for layer in cache.sizes
        ]
        for side, name in sorted({key for layer in layer_bytes for key in layer}):
            cells = (str(layer.get((side, name), 0)) for layer in layer_bytes)
            rows.append((f"{n} {cache.name}: {side} {name}", *cells))
    return rows


def _errors(report: CacheReport) -> list[tuple[str, ...]]:
    rows = []
    for n, cache in enumerate(report.caches, 1):
        for side in ("k", "v"):
            relative: list[Any] = [getattr(layer, f"{side}_relative") for layer in cache.errors]
            cells = (NOTHING if value is None else f"{value:.4g}" for value in relative)
            rows.append((f"{n} {cache.name}: {side}", *cells))
    return rows


def _times(speed: Speed) -> PageTable:
    rows = tuple(
        (
            c.name,
            c.reads,
            *(
                f"{low:.3g}; {median:.3g}"
                for low, median in zip(c.fastest_ms, c.medians_ms, strict=True)
            ),
        )
        for c in speed.caches
    )
    return PageTable(
        "Decode steps, ms: fastest; median",
        ("cache", "read by", *(f"{n} tokens" for n in speed.contexts)),
        rows,
    )


def _mode(report: CacheReport) -> str:
    request = report.request
    text = {
        "decode": (
            "token after token, as generation does"
            + (f" ({request.step} at a time)" if (request.step or 1) > 1 else "")
        ),
        "chunked": f"chunks of {request.chunk} tokens, as serving reads a prompt",
        "fake": (
            "one forward pass with every token quantized, as the perplexities of KVQuant and XQuant"
            " are simulated"
        ),
    }[request.mode]
    return text + (f", after a prompt of {request.prompt} tokens" if request.prompt else "")
