"""Names in a report: without formulas or directories.

They are looked at in the committed report: no model runs.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from kvq_tools.report import page, schema

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


@pytest.fixture(scope="module")
def report():
    return schema.read(pathlib.Path(__file__).with_name("smollm2_report.json"))


def test_a_dollar_in_the_name_of_a_cache_begins_no_formula(report):
    """Matplotlib raises ValueError for a formula that it cannot read, when it draws."""
    named = tuple(
        dataclasses.replace(cache, name=f"$\\frac{{$ {cache.name}") for cache in report.caches
    )
    for section in page.sections(dataclasses.replace(report, caches=named)):
        for picture in section.pictures:
            assert picture.light, picture.name


def test_headings_name_no_directories(report):
    folder = "/home/someone/models/Llama-3.1-8B"
    changed = dataclasses.replace(
        report,
        model=dataclasses.replace(report.model, name=folder),
        text=dataclasses.replace(report.text, name="/tmp/wiki.txt"),
    )
    head = page.html(changed, ()).partition("<pre>")[0]
    assert "<title>kvq report: Llama-3.1-8B</title>" in head
    assert f"<h1>Llama-3.1-8B through {len(report.caches)} KV caches</h1>" in head
    assert f"wiki.txt: {report.text.tokens} tokens" in head
    assert folder not in head
    assert "/tmp/" not in head
    assert [page.title(name) for name in ("embedded", "meta-llama/Llama-3.1-8B")] == [
        "embedded",
        "meta-llama/Llama-3.1-8B",
    ]
