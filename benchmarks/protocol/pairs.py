"""Make benchmarks/results/pairs.md: the papers' methods beside one another at about equal bits, by
the rows of the protocol.

A pair stands here for each claim of a paper that SmolLM2 and Gemma can answer by KL at equal
windows: the cache that should win first. Below them is waterfill in each basis, and with plans of
`kvq plan` beside equal budgets of layers. `python -m benchmarks.results_page` writes the file.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from benchmarks import llama_8b
from benchmarks.markdown import table, with_interval
from benchmarks.protocol import large_models, made_plans
from benchmarks.protocol.front_page import LENGTH, SOURCES
from benchmarks.protocol.large_models import CONTEXT
from benchmarks.protocol.report import ProtocolReport
from benchmarks.report_file import RESULTS
from kvq_tools.evaluation.intervals import Estimate
from kvq_tools.evaluation.protocol import READINGS, RECENT, SINK, WORDS

FILE = RESULTS / "pairs.md"
MULTI_HEAD_FILE = RESULTS / "protocol_smollm2_multi_head.json"
KIVI, NUQ = "kivi:bits={}", "kvquant:bits={}"
PAIRS = (
    *((f"squat{which}", KIVI.format(2)) for which in (":bits=2", "_pre:bits=2,rank=60")),
    *((f"xquant:bits={bits}", KIVI.format(bits)) for bits in (2, 3, 4)),
    *((f"xquant:bits={bits}", NUQ.format(bits)) for bits in (2, 3, 4)),
    ("xquant:bits=2", "squat_pre:bits=2,rank=60"),
    ("xquant_cl:bits=2", "xquant:bits=2"),
    *((NUQ.format(bits), KIVI.format(bits)) for bits in (2, 3, 4)),
    (NUQ.format(2), "nf3"),
    (NUQ.format(3), "int3"),
    ("innerq:bits=1", KIVI.format(2)),
    ("innerq:bits=2,mode=sym", KIVI.format(3)),
    ("innerq:bits=2", KIVI.format(3)),
    ("k=polarquant+v=kivi:bits=4", KIVI.format(4)),
    ("turboquant:bits=2", "kivi:bits=2,group_size=64"),
    ("turboquant:bits=3", KIVI.format(2)),
    ("turboquant:bits=4", KIVI.format(3)),
    ("zipcache", KIVI.format(3)),
    ("gear:outliers=0", KIVI.format(3)),
    ("nf4", "int4"),
    ("nvfp4", "mxfp4"),
    ("kvarn", KIVI.format(2)),
    ("k=kvarn:bits=4+v=kvarn:bits=2", KIVI.format(3)),
    *((f"oscar_{which}", KIVI.format(2)) for which in ("omni", "spectral")),
    ("optr", KIVI.format(2)),
    ("block_gtq", KIVI.format(3)),
    ("block_gtq:bits=2", "turboquant:bits=2"),
)
PAIRS_OF_ROPE, EIGEN, ROTATED = (
    "waterfill:bits={}" + bases for bases in ("", ",key_basis=eigen", ",preset=rotated")
)
BASES = (
    (PAIRS_OF_ROPE.format(2.5), KIVI.format(2)),
    (PAIRS_OF_ROPE.format(3), "turboquant:bits=3"),
    (PAIRS_OF_ROPE.format(4), "turboquant:bits=4"),
    (PAIRS_OF_ROPE.format(4), "xquant:bits=4"),
    *((EIGEN.format(2.5), other) for other in (KIVI.format(2), "turboquant:bits=3")),
    (EIGEN.format(2.1), "block_gtq:bits=2"),
    *(
        (EIGEN.format(2.85), other)
        for other in ("turboquant:bits=3", "block_gtq", "k=kvarn:bits=4+v=kvarn:bits=2")
    ),
    (ROTATED.format(2.25), PAIRS_OF_ROPE.format(2.5)),
    (ROTATED.format(2.25), EIGEN.format(2.5)),
    (ROTATED.format(2.75), EIGEN.format(2.85)),
    (ROTATED.format(3.1), "block_gtq"),
    *((plan, plan.replace(made_plans.MARK, ":bits=")) for plan in made_plans.made_for("smollm2")),
)
MULTI_HEAD = (
    *((f"xquant:bits={bits}", KIVI.format(2)) for bits in (2, 3, 4)),
    *(("xquant:bits=4", other) for other in ("turboquant:bits=3", "int4", KIVI.format(4))),
)
INTRODUCTION = f"""\
# The papers' methods in pairs

Made by `python -m benchmarks.results_page` from the rows of the protocol: the KL of a cache over
that of another on the same windows, which are of other domains than the calibration's, in contexts
of {LENGTH} tokens. Brackets are 95 % intervals, t, of the logs of the ratios over the windows of
all texts, widened by rounding; in bold if they leave out 1. If the texts lie on different sides of
1, and one of them by its own interval, each text's ratio follows. All caches keep the first {SINK}
and the newest {RECENT} tokens exact; those with ‡ keep more, because their blocks are longer. Those
with * learned from a text. Bits are resident, for one sequence of {CONTEXT // 1024}K tokens of
{llama_8b.NAME}."""
BASES_HEAD = "## Waterfill in each basis, and with the widths of a plan"
OWN_HEADS = f"""\
## If each query head has its KV head

XQuant's headline is about such models: keys and values take twice the bytes of a layer's input. No
small one can be had, so `python -m laboratory.multi_head` converts a model, with equal outputs.
Bits are of {large_models.MULTI_HEAD}."""


def contents() -> str:
    """Render the page from the reports that are there."""
    parts = [INTRODUCTION, *_section(SOURCES, PAIRS), BASES_HEAD, *_section(SOURCES, BASES)]
    if MULTI_HEAD_FILE.is_file():
        parts += [OWN_HEADS, *_section((MULTI_HEAD_FILE,), MULTI_HEAD)]
    return "\n\n".join(parts) + "\n"


def _section(sources: Sequence[pathlib.Path], pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the table of these reports, and where their numbers are."""
    files = [file for file in sources if file.is_file()]
    reports = [ProtocolReport.read(file) for file in files]
    columns = [(report, reading) for report in reports for reading in READINGS]
    filled = [
        (report, reading)
        for report, reading in columns
        if any(report.find(cache, LENGTH, reading) for cache, _ in pairs)
    ]
    head = (
        *("cache", "bits", "over", "bits"),
        *(f"{report.model}, {WORDS[reading]}" for report, reading in filled),
    )
    lines = [line for pair in pairs if any((line := _line(pair, filled))[4:])]
    pages = zip(reports, files, strict=True)
    links = ", ".join(f"[{report.model}]({file.stem}.md)" for report, file in pages)
    return table(head, lines), f"All numbers: {links}."


def _line(pair: tuple[str, str], columns: list[tuple[ProtocolReport, str]]) -> tuple[str, ...]:
    one, other = (_cells(cache, columns) for cache in pair)
    return (*one, *other, *(_ratio(report, reading, pair) for report, reading in columns))


def _cells(cache: str, columns: list[tuple[ProtocolReport, str]]) -> tuple[str, str]:
    """Return a cache's name and bits, from the first report that has it."""
    for report, reading in columns:
        if row := report.find(cache, LENGTH, reading):
            bits = "" if row.of_layers else f"{report.large(row)[0].resident_bits:.2f}"
            return report.named(row), bits
    return f"`{cache}`", ""


def _ratio(report: ProtocolReport, reading: str, pair: tuple[str, str]) -> str:
    one, other = (report.find(cache, LENGTH, reading) for cache in pair)
    if one is None or other is None:
        return ""
    ratio = report.ratio(one, other)
    shown = with_interval(*ratio, ".2f")
    low, high = ratio.interval  # nan if one window was measured
    pooled = f"**{shown}**" if low > 1 or high < 1 else shown
    of_texts = report.ratio_by_text(one, other)
    return f"{pooled} ({_of_each(of_texts)})" if differ(of_texts.values()) else pooled


def differ(ratios: Iterable[Estimate]) -> bool:
    """Return True if ratios lie on different sides of 1, at least one of them by its interval."""
    texts = list(ratios)
    sides = {ratio.value > 1 for ratio in texts}
    return len(sides) > 1 and any(low > 1 or high < 1 for _, (low, high) in texts)


def _of_each(ratios: Mapping[str, Estimate]) -> str:
    return ", ".join(f"{text} {with_interval(*ratio, '.2f')}" for text, ratio in ratios.items())
