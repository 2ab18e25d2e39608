"""The table of caches in the README and in results/README.md, and the paragraph below it.

Resident bytes are counted for an 8B model. KL was measured by `python -m benchmarks.quality
waterfill` on two texts, in equal windows.

`python -m benchmarks.results_page` writes it to both places, between two comments.
"""

from __future__ import annotations

import dataclasses
import pathlib
import textwrap
from collections.abc import Sequence

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.markdown import table, with_interval
from benchmarks.quality.report import QualityReport, QualityRow
from benchmarks.report_file import RESULTS
from kvq_jax.cache.size import COMPARED_BATCHES as BATCHES

README = pathlib.Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- made by python -m benchmarks.results_page -->"
END = "<!-- end of what was made -->"
FILES = "quality_waterfill_smollm2", "quality_waterfill_novel_smollm2"
CONTEXT = 32768
CACHES = (
    "xquant_cl:bits=2",
    "waterfill:bits=2.5",
    "kivi:bits=2",
    "squat_pre:bits=2,rank=60",
    "turboquant:bits=3",
    "kvquant:bits=3",
    "innerq:bits=2",
    "int4",
    "xquant:bits=4",
    "kivi:bits=4",
)
COLUMNS = (
    "cache",
    "stored bits",
    *(f"resident GiB, batch {batch}" for batch in BATCHES),
    "KL, WikiText-2",
    "KL, novel",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A cache: its spec as it was measured, its size for each of BATCHES, and its quality on each
    text."""

    cache: str
    spec: kvq.cache.CacheSpec
    sizes: tuple[kvq.size.Size, ...]
    measured: tuple[QualityRow, ...]


def read(folder: pathlib.Path = RESULTS) -> list[QualityReport]:
    """Read the reports of both texts; WikiText-2's is the first."""
    return [QualityReport.read(folder / f"{name}.json") for name in FILES]


def section(reports: Sequence[QualityReport], results: str) -> str:
    """Render the table, the smallest cache first, and the paragraph below it. `results` leads from
    the page to benchmarks/results."""
    rows = sorted(
        (_read_row(cache, reports) for cache in CACHES), key=lambda row: row.sizes[0].resident
    )
    note = textwrap.fill(
        _note(reports, rows, results), 100, break_long_words=False, break_on_hyphens=False
    )
    return f"{table(COLUMNS, map(_line, rows))}\n\n{note}"


def replaced(page: str, text: str) -> str:
    """Return the page with `text` between the two comments. ValueError if a comment is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or, after it, {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def _read_row(cache: str, reports: Sequence[QualityReport]) -> Row:
    measured = tuple(
        next(row for row in report.rows if _default_windows(row.cache) == kvq.parse(cache))
        for report in reports
    )
    config = llama_8b.llama_config()
    sizes = tuple(kvq.size.of(measured[0].cache, config, batch, CONTEXT) for batch in BATCHES)
    return Row(cache, kvq.parse(measured[0].cache), sizes, measured)


def _default_windows(cache: str) -> kvq.cache.CacheSpec:
    spec = kvq.parse(cache)
    windows = dataclasses.asdict(spec.k.windows())
    return dataclasses.replace(spec, **windows) if spec.k == spec.v else spec


def _line(row: Row) -> tuple[str, ...]:
    return (
        f"`{row.cache}`",
        f"{row.sizes[0].stored_bits:.2f}",
        *(f"{size.resident / 2**30:.2f}" for size in row.sizes),
        *(with_interval(one.kl, one.kl_interval, "#.2g") for one in row.measured),
    )


def _note(reports: Sequence[QualityReport], rows: Sequence[Row], results: str) -> str:
    """Say how the table was measured. ValueError if its rows differ in their windows."""
    settings = {(report.model, report.windows, report.window, report.prompt) for report in reports}
    exact = {(row.spec.sink, row.spec.recent) for row in rows}
    if len(settings) != 1 or len(exact) != 1:
        raise ValueError(f"rows of one table have different windows: {settings=}, {exact=}")
    ((_, windows, window, prompt),), ((sink, recent),) = settings, exact
    blocks = sorted({row.spec.block for row in rows})
    largest = ", ".join(f"`{row.spec.k.name}`" for row in rows if row.spec.block == blocks[-1])
    contexts = prompt + 1, window - 1
    body = [row.spec.regions(window).body(context) for row in rows for context in contexts]
    dense = [kvq.size.of("dense", llama_8b.llama_config(), batch, CONTEXT) for batch in BATCHES]
    bf16 = " and ".join(f"{size.resident / 2**30:.0f}" for size in dense)
    pages = " and ".join(
        f"[{text}]({results}{name}.md)"
        for text, name in zip(("on WikiText-2", "on the novel"), FILES, strict=True)
    )
    return (
        "Resident GiB count the cache, what its method adds to the model, and the working memory of"
        f" a step, for {' and '.join(map(str, BATCHES))} sequences of {CONTEXT // 1024}K tokens of"
        f" {llama_8b.NAME} (bfloat16: {bf16} GiB); stored bits count the cache alone. KL to full"
        " precision is that of SmolLM2-135M, decoded through the real cache, with 95 % t intervals"
        " over the logs of the windows. In every row the first"
        f" {sink} and the newest {recent} tokens are exact,"
        f" {min(body)} to {max(body)} of the {contexts[0]} to {contexts[1]} tokens before a scored"
        f" one are read from the quantized body (in blocks of {blocks[0]};"
        f" {largest}: {blocks[-1]}), and the {contexts[1] - prompt} tokens after a prompt of"
        f" {prompt} are scored in {windows} windows of each text, too few to tell close rows apart."
        " `kvquant` and `waterfill` learn from WikiText-2 first (`kvq calibrate`), so the novel is"
        f" outside of their domain. All rows: {pages}."
    )
