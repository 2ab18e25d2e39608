"""The page of a report: it holds every cache and every number, and needs nothing else."""

import dataclasses
import html
import json
import re

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models.llama.weight_count import weight_count
from kvq_tools.report import page, quality, schema

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from tests.kvq_tools.report.small_report import CACHES, WINDOW, call


def rows_of(text):
    """{the name of a table's row: its cells}"""
    found = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", text)
    return {html.unescape(name): re.findall(r"<td>(.*?)</td>", cells) for name, cells in found}


def test_the_page_holds_every_cache_and_every_number(made, model, report):
    config = model[0].config
    text = (made / "index.html").read_text()
    head, rows = html.unescape(text.partition("<main>")[0]), rows_of(text)
    parameters = f"{weight_count(config):,} parameters"
    told = (parameters, "64 tokens, 63 of them scored", "mode fake")
    for fact in (report.model.name, report.command, report.date, *told):
        assert fact in head, fact
    assert report.speed.machine.device in text
    exact = [f"{report.exact.perplexity:.3f}", f"{report.exact.bits_per_byte:.4f}"]
    assert rows["model without a cache"][1:3] == exact
    assert rows["model without a cache"][6] == str(kvq.size.dense_nbytes(config, 1, WINDOW))
    assert rows["model without a cache: nats"] == [f"{n:.4f}" for n in report.exact.nats]
    assert rows["tokens"] == [str(p.tokens) for p in report.positions]
    for n, c in enumerate(report.caches, 1):
        name = f"{n} {c.name}"
        own, shared = c.bytes + c.working_bytes, c.parameter_bytes
        cells = (
            f"{c.perplexity:.3f} {c.bits_per_byte:.4f} {c.kl:.5f} {c.agreement:.2%}",
            f"{len(c.flips)} {c.bytes} {c.ratio:.2f} {c.bits_per_element:.2f}",
            f"{c.body_bits_per_element:.2f} {shared} {c.working_bytes} {own + shared}",
            f"{16 * own + shared} {c.sink}, {c.recent}, {c.block} {c.quantized_tokens}",
        )
        assert " ".join(rows[name][1:]) == " ".join(cells)
        assert rows[f"{name}: nats"] == [f"{v:.4f}" for v in c.nats]
        assert rows[f"{name}: KL"] == [f"{v:.5f}" for v in c.kl_by_position]
        assert rows[f"{name}: flips"] == list(map(str, c.flips_by_position))
        for side in ("k", "v"):
            assert rows[f"{name}: {side}"] == [
                f"{getattr(e, f'{side}_relative'):.4g}" for e in c.errors
            ]
        for part in c.sizes[0]:
            held = [
                next(p.bytes for p in layer if (p.side, p.name) == (part.side, part.name))
                for layer in c.sizes
            ]
            assert rows[f"{name}: {part.side} {part.name}"] == list(map(str, held))
    for c in report.speed.caches:
        samples = c.samples_ms[0]
        assert rows[c.name] == [c.reads, f"{min(samples):.3g}; {np.median(samples):.3g}"]
    assert rows[f"1 {CACHES[0]}"] != rows[f"2 {CACHES[1]}"]


def test_the_page_needs_nothing_else(made):
    text = (made / "index.html").read_text()
    outside = re.findall(
        r"https?:|<script|<link(?! rel=\"icon\" href=\"data:)|@import|@font-face|<iframe", text
    )
    assert not outside, outside
    references = re.findall(r"(?:src|href)=\"([^\"]*)\"|url\(([^)]*)\)", text)
    foreign = [
        found
        for pair in references
        if (found := "".join(pair)) and not found.startswith(("#", "data:"))
    ]
    assert not foreign, foreign
    assert any(found.startswith("data:image/png") for pair in references for found in pair), (
        "no picture inside the page was looked at"
    )


def test_the_page_can_be_made_again_from_json_alone(made, tmp_path):
    assert call("report", "--from", made / "report.json", "--out", tmp_path) == 0
    for name in ("index.html", "report.json", "pareto_kl.png", "magnitudes.png"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes(), name
    fields = json.loads((made / "report.json").read_text())
    fields["caches"][0]["kl"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(fields))
    other = quality.pareto_kl(schema.read(tmp_path / "other.json"))
    assert other.light != (made / f"{other.name}.png").read_bytes(), (
        "a picture does not depend on the numbers"
    )


def test_numbers_that_are_not_finite_and_times_that_were_not_taken_are_left_out(made, report):
    lost = dataclasses.replace(
        report.caches[0], kl=None, perplexity=None, kl_by_position=(None,) * 4, nats=(None,) * 4
    )
    changed = dataclasses.replace(report, caches=(lost, report.caches[1]), speed=None)
    assert quality.front_by(changed, "kl") == (False, True)
    text = page.html(changed, page.sections(changed))
    row = re.search(rf"<tr><th[^>]*>1 {re.escape(CACHES[0])}</th>(.*?)</tr>", text)
    assert row
    assert row[1].startswith("<td></td><td>–</td>"), row[1][:80]
    assert "Decode steps" not in text
    assert "Decode steps" in (made / "index.html").read_text()


def test_a_cache_of_which_nothing_is_read_quantized_is_told_loudly(report):
    assert [c.quantized_tokens for c in report.caches] == [WINDOW - 1] * 2, (
        "in `fake` mode every token is"
    )
    assert quality.warning(report) == ""
    asleep = dataclasses.replace(report.caches[0], quantized_tokens=0, kl=0.0)
    dense = dataclasses.replace(asleep, name="dense", spec="dense")
    changed = dataclasses.replace(report, caches=(asleep, report.caches[1], dense))
    told = (
        f"NOT ONE token was read quantized through {CACHES[0]}: what is measured there is the"
        " full-precision model"
    )
    assert told in page.sections(changed)[0].text
    cells = {row[0]: row[-1] for row in page.numbers(changed).rows}
    assert (cells[f"1 {CACHES[0]}"], cells[f"2 {CACHES[1]}"]) == ("NONE", str(WINDOW - 1))


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
    for name in ("embedded", "meta-llama/Llama-3.1-8B"):
        assert page.title(name) == name
