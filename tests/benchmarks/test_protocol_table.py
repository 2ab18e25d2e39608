"""The README's table of caches: its numbers by hand, from windows that calibration has not seen."""

import dataclasses
import json

import numpy as np
import pytest

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.protocol import front_page
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
