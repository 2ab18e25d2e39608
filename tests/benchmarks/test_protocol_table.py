"""The README's table of caches: its numbers by hand, from windows that calibration has not seen."""

import dataclasses
import json

import numpy as np
import pytest

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.protocol import equal_bytes, front_page
from benchmarks.protocol.caches import README
from benchmarks.protocol.page import page
from benchmarks.protocol.report import ProtocolReport

CACHE = "xquant:bits=4"


@pytest.fixture(scope="module")
def report() -> ProtocolReport:
    return ProtocolReport.read(front_page.FILE)


def test_a_line_holds_the_counted_bytes_and_the_divergence_out_of_domain(report: ProtocolReport):
    line = next(
        line
        for line in front_page.section(report, "").splitlines()
        if line.startswith(f"| `{CACHE}` |")
    )
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    stored = json.loads(front_page.FILE.read_text(encoding="utf-8"))
    row = next(row for row in stored["rows"] if (row["cache"], row["reading"]) == (CACHE, "prompt"))
    config = llama_8b.llama_config()
    one, many = (kvq.size.of(row["spec"], config, batch, 32768) for batch in (1, 16))
    assert cells[1:4] == [
        f"{one.resident_bits:.2f}",
        f"{one.resident / 2**30:.2f}",
        f"{many.resident / 2**30:.2f}",
    ]
    assert one.resident > one.cache, "its factors of the weights count"
    domains = [text["domain"] for text in stored["texts"] for _ in range(stored["windows"])]
    seen = stored["calibration_text"]["domain"]
    kl = np.array(row["measured"]["window_kl"])
    outside = kl[np.array(domains) != seen].mean()
    assert f"{outside:#.2g} [" in line
    assert f"{kl.mean():#.2g} [" not in line, "windows of the calibration's domain would pass"


def test_a_reading_without_all_rows_makes_no_table(report: ProtocolReport):
    rows = tuple(row for row in report.rows if row.cache != CACHE)
    assert front_page.readings(report)
    assert not front_page.readings(dataclasses.replace(report, rows=rows))


def test_a_cache_alone_gets_no_verdict(report: ProtocolReport):
    alone = dataclasses.replace(report, rows=report.rows[:1])
    assert "bits take" in page(report, front_page.FILE)
    assert "bits take" not in page(alone, front_page.FILE)


@pytest.fixture(scope="module")
def in_pairs(report: ProtocolReport) -> ProtocolReport:
    """Return the rows of the README but the eigenbasis: waterfill has one cache, of 2.5 bits."""
    pairs = [cache for cache in README if "key_basis" not in cache]
    rows = tuple(row for row in report.rows if row.cache in pairs)
    return dataclasses.replace(report, rows=rows)


def test_each_cache_meets_the_best_waterfill_cache_that_is_no_larger(in_pairs: ProtocolReport):
    smaller = next(row for row in in_pairs.rows if row.cache == "waterfill:bits=2.5")
    half = dataclasses.replace(
        smaller.measured, window_kl=tuple(kl / 2 for kl in smaller.measured.window_kl)
    )
    larger = dataclasses.replace(
        smaller, cache="waterfill:bits=4", spec="waterfill:bits=4,sink=4,recent=32", measured=half
    )
    both = dataclasses.replace(in_pairs, rows=(*in_pairs.rows, larger))
    bits = larger.sizes_8b()[0].resident_bits
    met = {row.cache: (row, best) for row, best, _ in equal_bytes.compared(both, "prompt", 0)}
    assert len(met) == len(README) - 2, "every cache of the README but waterfill itself"
    for row, best in met.values():
        fits = row.sizes_8b()[0].resident_bits >= bits
        assert best == (larger if fits else smaller), row.cache
    assert {best for _, best in met.values()} == {larger, smaller}, "the sizes decide nothing"


def test_a_verdict_beside_waterfill_needs_the_whole_interval(in_pairs: ProtocolReport):
    ratios = {
        row.cache: (ratio, equal_bytes.verdict(ratio))
        for row, _, ratio in equal_bytes.compared(in_pairs, "prompt", 0)
        if ratio
    }
    for cache, (ratio, said) in ratios.items():
        low, high = ratio.interval
        by_hand = {
            "behind": low > 1,
            "not told apart": low <= 1 <= high,
            "ahead": 1 / 1.5 <= high < 1,
            "ahead by more than 1.5": high < 1 / 1.5,
        }
        assert [verdict for verdict, holds in by_hand.items() if holds] == [said], cache
    assert {"ahead", "behind"} <= {said for _, said in ratios.values()}
