"""The README's table of caches: its numbers by hand, from windows that calibration has not seen."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.protocol import equal_bytes, front_page, large_models, made_plans, pairs
from benchmarks.protocol.caches import README
from benchmarks.protocol.page import page
from benchmarks.protocol.report import ProtocolReport
from kvq_tools.evaluation.intervals import Estimate, Interval

ROOT = pathlib.Path(__file__).parents[2]
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


def test_caches_of_longer_blocks_are_marked_and_no_verdict_names_them(report: ProtocolReport):
    kept = tuple(
        dataclasses.replace(row, exact_share=1.2 * row.exact_share) if row.cache == CACHE else row
        for row in report.rows
    )
    longer = dataclasses.replace(report, rows=kept)
    for one, mark in ((report, ""), (longer, "‡")):
        text = page(one, front_page.FILE).partition("\n\n## 2048 tokens, decoded")[0]
        assert f"| `{CACHE}`{mark} |" in text
        verdict = next(line for line in text.splitlines() if "bits take" in line)
        assert (f"`{CACHE}`" in verdict) == (not mark)
    assert longer.named(longer.row(CACHE, 2048, "prompt")) == f"`{CACHE}`‡"


def test_plans_have_no_size_for_another_model_and_compete_by_their_own_bytes(
    report: ProtocolReport,
):
    plans = [row for row in report.quantized(2048, "prompt") if row.of_layers]
    assert plans
    with pytest.raises(ValueError, match="widths for the layers of smollm2 alone"):
        report.large(plans[0])
    best = {
        batch: {row.cache for _, row, _ in equal_bytes.compared(report, "prompt", batch) if row}
        for batch in (0, None)
    }
    names = {row.cache for row in plans}
    assert not names & best[0]
    assert names & best[None]
    assert not names & {point.name for point in front_page.points(report, "prompt")}
    cells = _cells(page(report, front_page.FILE), "after", f"| `{plans[0].cache}`")
    assert cells[1:4] == ["", "", ""]


def test_texts_on_different_sides_of_1_are_told_apart():
    def estimate(low: float, high: float) -> Estimate:
        return Estimate((low * high) ** 0.5, Interval(low, high))

    below, above = estimate(0.5, 0.9), estimate(0.9, 2.0)
    assert pairs.differ([below, above])
    assert not pairs.differ([below, below])
    assert not pairs.differ([estimate(0.8, 1.1), above]), "neither text tells anything"
    text = " ".join(pairs.contents().split())
    assert "0.97 [0.79, 1.19] (novel 1.47 [1.27, 1.70], code 0.65 [0.55, 0.76])" in text


def test_a_page_lists_the_caches_that_were_not_measured(report: ProtocolReport):
    rows = tuple(row for row in report.rows if (row.cache, row.reading) != (CACHE, "prompt"))
    for one, expected in ((report, False), (dataclasses.replace(report, rows=rows), True)):
        lists = page(one, front_page.FILE).partition("that were not measured")[2]
        line = next((line for line in lists.splitlines() if "2048 tokens, after" in line), "")
        assert (f"`{CACHE}`," in line) == expected
    chosen = dataclasses.replace(report, rows=rows, command=f"{report.command} --caches dense")
    assert "not measured" not in page(chosen, front_page.FILE)


@pytest.fixture(scope="module")
def in_pairs(report: ProtocolReport) -> ProtocolReport:
    """Return the rows of the README but the eigenbasis: waterfill has one cache, of 2.5 bits."""
    pairs = [cache for cache in README if "preset=rotated" not in cache]
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
    bits = both.large(larger)[0].resident_bits
    met = {row.cache: (row, best) for row, best, _ in equal_bytes.compared(both, "prompt", 0)}
    assert met.keys() == {cache for cache in README if not cache.startswith("waterfill")}
    for row, best in met.values():
        fits = both.large(row)[0].resident_bits >= bits
        assert best == (larger if fits else smaller), row.cache
    assert {best for _, best in met.values()} == {larger, smaller}, "the sizes decide nothing"
    tiny = dataclasses.replace(larger, model_bytes=1)
    of_own_bytes = dataclasses.replace(in_pairs, rows=(*in_pairs.rows, tiny))
    met_by_own = equal_bytes.compared(of_own_bytes, "prompt", None)
    assert {best for _, best, _ in met_by_own} == {tiny}, (
        "the measured model's bytes decide nothing"
    )


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
            "ahead by more than 1.5 times": high < 1 / 1.5,
        }
        assert [verdict for verdict, holds in by_hand.items() if holds] == [said], cache
    assert {"ahead", "behind"} <= {said for _, said in ratios.values()}


def _cells(text: str, heading: str, start: str) -> list[str]:
    """Return the cells of the first line below a heading that starts so."""
    below = text.partition(heading)[2]
    line = next(line for line in below.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_model_of_own_kv_heads_has_the_bits_of_a_large_one_of_its_kind(report: ProtocolReport):
    shared = llama_8b.llama_config()
    own = dataclasses.replace(shared, num_key_value_heads=shared.num_attention_heads)
    assert [large_models.like(config) for config in (shared, own)] == ["Llama-3.1-8B", "Llama-2-7B"]
    rows = tuple(row for row in report.rows if row.cache == CACHE)
    report = dataclasses.replace(report, rows=rows)
    of_own = dataclasses.replace(report, large_model="Llama-2-7B")
    start = f"| `{CACHE}`"
    at = [_cells(page(one, front_page.FILE), "after", start)[1] for one in (report, of_own)]
    layer_input, keys_and_values = 4096, 2 * 32 * 128
    cache = kvq.size.of(report.row(CACHE, 2048, "prompt").spec, own, 1, 32768)
    stored = 8 * cache.cache / (32 * 32768 * layer_input)  # bits of an element of layers' inputs
    assert float(at[1]) == pytest.approx(stored * layer_input / keys_and_values, abs=0.01)
    assert float(at[0]) > 2 * float(at[1]), "XQuant keeps half the elements if no head is shared"
    with pytest.raises(ValueError, match="no large model 'GPT-2'"):
        dataclasses.replace(report, large_model="GPT-2").large(report.rows[0])


def test_a_page_marks_rows_of_another_processor_and_says_how_far_they_move(report: ProtocolReport):
    here = tuple(dataclasses.replace(row, processor="EPYC") for row in report.rows)
    report = dataclasses.replace(report, rows=here)
    row = report.row(CACHE, 2048, "prompt")
    assert "†" not in page(report, front_page.FILE)
    larger = tuple(1.25 * kl for kl in row.measured.window_kl)
    moved = dataclasses.replace(
        row, processor="Xeon", measured=dataclasses.replace(row.measured, window_kl=larger)
    )
    rows = tuple(moved if one is row else one for one in report.rows)
    text = page(dataclasses.replace(report, rows=rows, elsewhere=(row,)), front_page.FILE)
    marked = [line for line in text.splitlines() if line.startswith("|") and "†" in line]
    assert len(marked) == 1
    assert marked[0].startswith(f"| `{CACHE}`†")
    assert "Rows marked † were measured on another processor: Xeon." in text
    of_one = dataclasses.replace(report, rows=rows)
    nameless = tuple(
        dataclasses.replace(one, processor="") if one is moved else one for one in rows
    )
    old = page(dataclasses.replace(report, rows=nameless), front_page.FILE)
    assert "†" not in old, "of a name that was not kept, nothing is known"
    assert f"1 of {len(rows)} rows do not name their processor." in old
    for mark, one in (("†", of_one), ("", report)):
        assert one.marked(one.row(CACHE, 2048, "prompt")) == f"`{CACHE}`{mark}"
    ratio = _cells(text, "## On another processor", f"| `{CACHE}`")[-1]
    assert float(ratio.partition(" ")[0]) == pytest.approx(1 / 1.25, abs=1e-3)


def test_a_ratio_of_one_window_has_no_interval_and_is_not_bold(
    report: ProtocolReport, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "one.json"
    one = dataclasses.replace(report, windows=1, texts=report.texts[:1], calibration_text=None)
    one.write(file)
    assert "**" in pairs.contents()
    monkeypatch.setattr(pairs, "SOURCES", (file,))
    monkeypatch.setattr(pairs, "MULTI_HEAD_FILE", tmp_path / "absent.json")
    text = pairs.contents()
    assert "| `kivi:bits=2` |" in text
    assert "**" not in text


def test_plans_are_as_far_off_as_the_decision_says():
    plans = made_plans.made_for("smollm2").values()
    factors = [plan.predicted / plan.measured for plan in plans]
    decision = (ROOT / "docs/decisions/planner.md").read_text(encoding="utf-8")
    said = f"predictions were {min(factors):.2f} to {max(factors):.2f} times what plans had"
    assert said in " ".join(decision.split())
