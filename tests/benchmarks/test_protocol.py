"""The protocol: equal windows, windows of a text, intervals, digits that recompute."""

import dataclasses
import math
import types
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.protocol import __main__ as protocol
from benchmarks.protocol import bench, made_plans
from benchmarks.protocol.caches import CACHES
from benchmarks.protocol.plan import Plan, planned
from benchmarks.protocol.report import ProtocolReport
from benchmarks.report_file import RESULTS
from kvq_jax.cache.dims import CacheDims, dims_of
from kvq_jax.layer.attention import Attention
from kvq_models import load_llama
from kvq_tools.evaluation import measure_rows
from kvq_tools.evaluation.intervals import kl_interval, t_quantile
from kvq_tools.evaluation.protocol import (
    BLOCKS,
    MAX_EXACT,
    READINGS,
    RECENT,
    SINK,
    Measured,
    ScoredText,
    Sizes,
    cut,
    exact_share,
    windowed,
)
from kvq_tools.planning.defaults import Bases

COMMITTED = RESULTS / "protocol_embedded.json"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_has_equal_windows_and_at_most_three_percent_exact(cache):
    config, sizes = llama_8b.llama_config(), Sizes()
    spec = windowed(cache, config, sizes)
    assert (spec.sink, spec.recent) == (SINK, RECENT)
    assert dataclasses.replace(spec, block=kvq.parse(cache).block) == dataclasses.replace(
        kvq.parse(cache), sink=SINK, recent=RECENT
    )
    share = exact_share(spec, config, sizes)
    assert share <= MAX_EXACT or spec.block > BLOCKS[0], share
    if spec.block > BLOCKS[0]:
        with pytest.raises(ValueError, match="does not divide the block"):
            kvq.cache.layout(dataclasses.replace(spec, block=BLOCKS[0]), config, 1, sizes.width)
        assert exact_share(spec, config, Sizes(4096)) <= MAX_EXACT


@pytest.mark.parametrize("name", made_plans.made_for("smollm2"))
def test_a_plans_name_stands_for_widths_of_its_bits_in_its_bases(name):
    """The name's bits are a budget, which widths of whole bits almost use up."""
    dims = CacheDims(
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        hidden_size=576,
    )
    spec = kvq.parse(made_plans.spec_of(name, "smollm2"))
    budget, _, bases = name.partition(made_plans.MARK)[2].partition(",")
    assert -0.05 < kvq.size.body_bits_per_element(spec, dims) - float(budget) <= 1e-6
    assert Bases.of(spec.k) == Bases.of(kvq.parse(f"waterfill:{bases}").k)


def test_a_plan_of_another_model_is_refused_by_name():
    name = next(iter(made_plans.made_for("smollm2")))
    with pytest.raises(ValueError, match=f"no plan {name!r} for gemma; it has none"):
        made_plans.spec_of(name, "gemma")
    assert made_plans.spec_of("kivi:bits=2", "gemma") == "kivi:bits=2"


def test_the_exact_share_is_that_of_the_regions_and_windows_of_layers():
    config, sizes = llama_8b.llama_config(), Sizes(96, 2, 1)
    spec = windowed("kivi:bits=2", config, sizes)
    read = (97, 98)  # 4 + 32 exact, blocks of 32: 32 in the body at both
    whole = np.mean([1 - 32 / n for n in read])
    assert exact_share(spec, config, sizes) == pytest.approx(whole)
    # without a sink 64 in the body, and 33 or 34 behind it, of the 48 tokens of the window
    window = np.mean([33 / 48, 34 / 48])
    layers = tuple(Attention(window=48 if i % 2 else None) for i in range(32))
    half = dataclasses.replace(dims_of(config), attention=layers)
    assert exact_share(spec, half, sizes) == pytest.approx((whole + window) / 2)


def test_windows_of_a_text_do_not_overlap_and_begin_with_its_first_token():
    text = ScoredText("a", "", np.arange(1000, dtype=np.int32))
    sizes = Sizes(80, 10, 3)
    rows = cut(text, sizes, bos=0)
    assert rows.shape == (3, 91)
    assert (rows[:, 0] == 0).all()
    assert len(set(rows[:, 1:].ravel().tolist())) == 3 * 90
    assert (np.diff(rows[:, 1:]) == 1).all()
    with pytest.raises(ValueError, match="has 1000 tokens, fewer than 12 windows of 90"):
        cut(text, Sizes(80, 10, 12), bos=0)


def test_the_last_tokens_are_scored_as_in_a_whole_measurement(shallow):
    llama, _ = load_llama(shallow, dtype="float32")
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 2048, (2, 112)), jnp.int32)
    kept = {}
    (whole,), (tail,) = (
        measure_rows([(llama, "int2:block=8")], rows, prompt=32, scored=scored, kept=kept)
        for scored in (None, 10)
    )
    assert tail.tokens == 10 < whole.tokens == 79
    assert np.array_equal(whole.token_kl[:, -10:], tail.token_kl)
    assert np.array_equal(whole.token_nats[:, -10:], tail.token_nats)
    assert whole.kl == pytest.approx(whole.token_kl.mean(axis=1))
    assert not np.allclose(tail.kl, whole.kl)
    with pytest.raises(ValueError, match="scored=80 must be between 1 and 79"):
        measure_rows([(llama, "int2:block=8")], rows, prompt=32, scored=80)


def test_rounding_widens_an_interval_and_verdicts_are_paired():
    kl = (0.1, 0.2, 0.3, 0.15)
    sure = Measured(kl, kl, kl, 0.1, 0.2, ((0.1, 0.1),))
    noisy = dataclasses.replace(sure, again=((0.1, 0.13), (0.2, 0.154)))
    every = range(4)
    assert sure.kl(every).interval == kl_interval(kl)
    low, high = np.log(sure.kl(every).interval)
    wide = np.log(noisy.kl(every).interval)
    error = noisy.rounding * t_quantile(4) / 2
    assert (wide[1] - wide[0]) / 2 == pytest.approx(math.hypot((high - low) / 2, error))
    doubled = dataclasses.replace(sure, window_kl=tuple(2 * value for value in kl))
    assert doubled.over(sure, every).value == pytest.approx(2)


def test_a_committed_row_recomputes_to_its_printed_digits(capsys):
    """The cheapest. `--recompute` alone does three."""
    report = ProtocolReport.read(COMMITTED)
    command = report.command.split()[3:]
    command[command.index("--json") + 1] = str(COMMITTED)
    with pytest.raises(SystemExit) as ended:
        protocol.main([*command, "--recompute", "1"])
    told = capsys.readouterr().out
    assert ended.value.code == 0, told
    assert told.rstrip().endswith("the same digits")


def test_a_run_goes_on_only_with_the_calibration_that_its_rows_have(tmp_path):
    file = tmp_path / "report.json"
    texts = ["--text", "passage", "--calibration-text", "passage", "--json", str(file)]

    def begun(*sizes: str) -> bench.Bench:
        words = ["embedded", *texts, *sizes]
        return bench.Bench(Plan.of(protocol.argument_parser().parse_args(words)))

    begun("--samples", "2").report.write(file)
    begun("--samples", "2", "--windows", "12")
    for other in (("--samples", "3"), ("--samples", "2", "--length", "64")):
        with pytest.raises(ValueError, match=r"another run \(samples and length of calibration\)"):
            begun(*other)


def test_a_run_that_goes_on_counts_the_bytes_of_its_rows_anew_and_names_all_contexts(tmp_path):
    file = tmp_path / "report.json"
    report = ProtocolReport.read(COMMITTED)
    rows = tuple(dataclasses.replace(row, model_bytes=1) for row in report.rows)
    dataclasses.replace(report, rows=rows).write(file)
    words = report.command.split()[3:]
    words[words.index("--json") + 1] = str(file)
    row = report.rows[0]
    words += ["--contexts", str(row.context), "--readings", row.reading, "--caches", row.cache]
    protocol.main(words)  # nothing is missing, so nothing is measured
    again = ProtocolReport.read(file)
    assert again.rows == report.rows
    assert "--caches" not in again.command
    contexts = " ".join(map(str, sorted({row.context for row in report.rows})))
    assert f"--contexts {contexts} " in again.command


@pytest.mark.parametrize(("processor", "kept"), [("another", 1), ("this", 0)])
def test_the_file_keeps_what_another_processor_measured(tmp_path, monkeypatch, processor, kept):
    file = tmp_path / "report.json"
    report = ProtocolReport.read(COMMITTED)
    rows = tuple(dataclasses.replace(row, processor="this") for row in report.rows)
    report = dataclasses.replace(report, rows=rows)
    report.write(file)
    cheapest = min(rows, key=lambda row: row.seconds)
    others = [row for row in rows if row.cache != cheapest.cache]
    chosen = min(others, key=lambda row: row.seconds)
    again = dataclasses.replace(chosen, processor=processor)
    monkeypatch.setattr(
        bench, "Bench", lambda plan: types.SimpleNamespace(measured=lambda _: [again])
    )
    plan = types.SimpleNamespace(json=file, caches=(chosen.cache,))
    (line,), equal = bench.recompute(plan, report, 1)
    assert equal
    assert line.startswith(f"{chosen.spec} at"), "only this cache was asked for"
    assert ProtocolReport.read(file).elsewhere == (again,) * kept


def test_the_page_has_the_rows_of_a_run():
    lines = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8").splitlines()
    below = lines[lines.index("| context | after a prompt | decoded | rows |") + 2 :]
    cells = [line.strip("| ").split(" | ") for line in below[: below.index("")]]
    for context, *_, said in cells:
        plan = types.SimpleNamespace(
            contexts=(int(context),),
            readings=READINGS,
            caches=None,
            config=types.SimpleNamespace(positions=int(context) + 512),
            sizes=lambda context: Sizes(context),
        )
        counts = Counter(row.reading for row in planned(plan))
        assert said == f"{counts['prompt']} + {counts['decoded']}", context
    assert len(cells) == 3
