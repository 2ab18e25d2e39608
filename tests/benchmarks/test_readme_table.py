"""The README's table of caches: its numbers by hand, and rows that are not comparable are
refused."""

from __future__ import annotations

import dataclasses

import pytest

import kvq_jax as kvq
from benchmarks import llama_8b, readme_table
from benchmarks.quality.report import QualityReport


@pytest.fixture(scope="module")
def reports() -> list[QualityReport]:
    return readme_table.read()


def with_other_spec(report: QualityReport, cache: str, spec: str) -> QualityReport:
    rows = tuple(
        dataclasses.replace(row, cache=spec) if row.cache == cache else row for row in report.rows
    )
    return dataclasses.replace(report, rows=rows)


def test_a_line_holds_the_counted_bytes_and_both_measured_divergences(reports):
    cache = "xquant:bits=4,sink=32,recent=96,block=128"
    line = next(
        line
        for line in readme_table.section(reports, "").splitlines()
        if line.startswith("| `xquant:bits=4` |")
    )
    config = llama_8b.llama_config()
    one, many = (kvq.size.of(cache, config, batch, 32768) for batch in (1, 16))
    in_domain, novel = (
        next(row for row in report.rows if row.cache == cache) for report in reports
    )
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == [
        f"{one.stored_bits:.2f}",
        f"{one.resident / 2**30:.2f}",
        f"{many.resident / 2**30:.2f}",
    ]
    assert cells[4].startswith(f"{in_domain.kl:#.2g} [")
    assert cells[5].startswith(f"{novel.kl:#.2g} [")
    assert one.resident > one.cache, "its factors of the weights count"


def test_rows_with_other_windows_are_refused(reports):
    first, novel = reports
    cache = "kivi:bits=2,sink=32,recent=96,block=32"
    other = with_other_spec(first, cache, "kivi:bits=2,sink=32,recent=32,block=32")
    with pytest.raises(ValueError, match="different windows"):
        readme_table.section([other, novel], "")
