"""Ratios of KL that documents print, beside those to the one cache that a table compares with.

A pair is the cache whose KL is divided, and the one that it is divided by, as rows write them.
tests/benchmarks/test_printed_intervals.py holds the documents to the pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import kvq_jax as kvq
from benchmarks.markdown import table, with_interval
from laboratory.quality.comparison import PLAIN
from laboratory.quality.report import QualityReport, QualityRow

WIDTHS = 4, 3, 2
HEADS = "KL of", "over that of", "ratio", "ratio, fake"
OTHER_TEXT = ", calibrated on the other text"

Side = tuple[str, bool]  # a cache, and True if the other text calibrated it
Pair = tuple[Side, Side]


def section(report: QualityReport, stem: str) -> list[str]:
    """Render the pairs of a file's report through the cache and in one pass, without columns that
    are empty. A run of some tables alone leaves out pairs of the others, and caches that differ in
    their exact first tokens have no ratio in one pass, which keeps no token exact."""
    lines = list(_lines(report, stem))
    if not lines:
        return []
    filled = [column for column in zip(HEADS, *lines, strict=True) if any(column[1:])]
    head, *lines = zip(*filled, strict=True)
    return ["## Ratios that documents print", table(head, lines)]


def _lines(report: QualityReport, stem: str) -> Iterator[tuple[str, ...]]:
    rows = {
        (row.cache, row.other_text, row.fake): row for row in report.rows if row.variant == PLAIN
    }
    for side, other in PAIRS.get(stem, ()):
        same_sink = kvq.parse(side[0]).sink == kvq.parse(other[0]).sink
        ratios = [
            _ratio(rows.get((*side, fake)), rows.get((*other, fake)))
            if same_sink or not fake
            else ""
            for fake in (False, True)
        ]
        if any(ratios):
            yield _name(side), _name(other), *ratios


def _ratio(row: QualityRow | None, other: QualityRow | None) -> str:
    return "" if row is None or other is None else with_interval(*row.kl_ratio(other), ".2f")


def _name(side: Side) -> str:
    cache, other_text = side
    return f"`{cache}`{OTHER_TEXT if other_text else ''}"


def _pairs(head: str, tail: str, *settings: tuple[str, str]) -> Iterator[Pair]:
    """Yield pairs of caches that differ in a part of their spec."""
    for one, other in settings:
        yield (f"{head}{one}{tail}", False), (f"{head}{other}{tail}", False)


def _innerq() -> Iterator[Pair]:
    windows = "sink=32,recent=96,block=32"
    yield from _pairs("innerq:", windows, ("", "normalize=false,"), ("bits=2,mode=sym,", "bits=2,"))
    for method in ("kivi", "innerq"):
        yield from _pairs(f"{method}:sink=", ",recent=96,block=32", ("0", "32"))


def _kvquant() -> Iterator[Pair]:
    for bits in WIDTHS:
        exact = f"kvquant:bits={bits},outliers=0,sink=0"
        yield from _pairs("", "", (exact, f"int{bits}"), (exact, f"nf{bits}"))
    for bits, sink in itertools.product(WIDTHS, (0, 1)):
        yield from _pairs(f"kvquant:bits={bits},outliers=", f",sink={sink}", ("0.01", "0"))
    for outliers, bits in itertools.product(("0", "0.01"), WIDTHS):
        yield from _pairs(f"kvquant:bits={bits},outliers={outliers},sink=", "", ("1", "0"))
    integers = "kvquant:bits=3,datatype=int,outliers=0,pre_rope="
    axes = (
        ("k_axis=channel,v_axis=token", "k_axis=token,v_axis=token"),
        ("k_axis=channel,v_axis=token", "k_axis=channel,v_axis=channel"),
    )
    yield from _pairs(f"{integers}false,", "", *axes)
    yield from _pairs(integers, "", ("true", "false"))
    yield from _pairs("int3:pre_rope=", "", ("true", "false"))
    levels = "datatype=int", "datatype=nf", "weighting=none", "weighting=fisher"
    yield from _pairs(
        "kvquant:bits=3,outliers=0,",
        "",
        *((level, "weighting=fisher_scale") for level in levels),
        ("datatype=nf", "datatype=int"),
    )
    for outliers in ("0.01", "0.03"):
        vector = f"kvquant:bits=3,outliers={outliers},thresholds="
        yield from _pairs(vector, "", ("vector", "matrix"))
    for outliers in ("0.01", "0"):
        ranges = f"kvquant:bits=3,outliers={outliers},channel_ranges="
        yield from _pairs(ranges, "", ("prompt", "calibrated"))
    for bits in WIDTHS:
        yield (f"kvquant:bits={bits}", True), (f"kvquant:bits={bits}", False)
    for bits in WIDTHS:
        yield from _pairs("", f":bits={bits}", ("kvquant", "kivi"))


def _polarquant() -> Iterator[Pair]:
    keys = "polarquant:preset=m4n2", "kivi:bits=2,group_size=64"
    yield from _pairs("k=", "+v=dense+cache:sink=0,recent=0,block=64", keys)


def _squat() -> Iterator[Pair]:
    windows = ",sink=0,recent=0,block=32"
    for lam in ("1e-1", "1e-2"):
        yield from _pairs("squat:lam=", f"{windows},rank=5", (lam, "1e-3"))
    yield from _pairs(f"squat:lam=1e-3{windows},rank=", "", ("5", "60"))


def _xquant() -> Iterator[Pair]:
    windows = "sink=0,recent=0,block=128"
    groups = f"group_size=64,{windows}"
    before_rope = f"group_size=64,pre_rope=true,{windows}"
    for bits in WIDTHS:
        latents = f"xquant:bits={bits},"
        kvquant = f"kvquant:bits={bits},{windows}"
        kivi = f"kivi:bits={bits},{before_rope}"
        yield from _pairs("", "", (f"{latents}{groups}", kivi), (f"{latents}{groups}", kvquant))
        outlier = f"{latents}latent=true,exact_outlier_channel="
        yield from _pairs(outlier, f",{groups}", ("true", "false"))
    for bits in (2, 3):
        differences = f"xquant_cl:bits={bits},base_layer=2,reading=post_norm,{groups}"
        others = (
            f"xquant:bits=4@0-2/{bits},{groups}",
            f"kvquant:bits={bits},{windows}",
            f"kivi:bits=4@0-2/{bits},{before_rope}",
        )
        yield from _pairs("", "", *((differences, other) for other in others))


PAIRS = {
    "quality_innerq_smollm2": tuple(_innerq()),
    "quality_kvquant_smollm2": tuple(_kvquant()),
    "quality_polarquant_smollm2": tuple(_polarquant()),
    "quality_squat_smollm2": tuple(_squat()),
    "quality_xquant_tables_smollm2": tuple(_xquant()),
}
