"""Plans: budgets are met as well as possible, a side measured alone equals a whole cache's, and
files are read or refused."""

import dataclasses
import itertools
import json
import math
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import EMBEDDED, load_llama, prepare, save_calibration
from kvq_models.calibration.fit import calibrate
from kvq_models.llama import open_checkpoint
from kvq_tools.cli import plan_budget, plan_rows, plan_table
from kvq_tools.cli.commands import plan
from kvq_tools.cli.options.plan import Bits, Budget, Bytes
from kvq_tools.evaluation import measure_rows
from kvq_tools.planning import kept, measuring, request, sensitivity
from kvq_tools.planning.allocation import SIDES, Costs, costs_of, mean, shared_out
from kvq_tools.planning.defaults import CODE, KEY_BASES, Bases
from kvq_tools.planning.request import PlanRequest
from kvq_tools.planning.sensitivity import Sensitivity, one_side
from kvq_tools.planning.unmeasured import spec_of, widths_within

PASSAGE = Path(__file__).parents[3] / "kvq_tools" / "cli" / "passage.txt"
STEP = 4


def drawn(layers: int, chunks: int, seed: int = 0) -> Costs:
    rng = np.random.default_rng(seed)
    logs = rng.normal(0, 2, (layers, 2, chunks)) + rng.normal(0, 1, (layers, 2, 1))
    sides = itertools.product(range(layers), SIDES)
    measured = {side: {2: 0.5, 6: rng.uniform(1, 3)} for side in sides}
    return Costs(np.sort(np.exp(logs), axis=-1)[..., ::-1], measured)


# --- allocation


@pytest.mark.parametrize("budget", [4, 12])
def test_a_budget_is_shared_out_as_well_as_by_trying_everything(budget: int):
    costs = drawn(layers=2, chunks=2)
    found = shared_out(costs, budget)
    assert sum(sum(map(sum, pair)) for pair in found) <= budget
    counts = range(1, 17)
    sides = list(itertools.product(range(2), SIDES))
    table = [
        np.minimum.accumulate([costs.cost(l, s, costs.best(l, s, n)) for n in counts])
        for l, s in sides
    ]
    minimum = min(
        sum(t[n - 1] for t, n in zip(table, ns, strict=True))
        for ns in itertools.product(counts, repeat=4)
        if sum(ns) <= budget
    )
    assert costs.total(found) <= 1.1 * minimum
    equal = [(costs.best(l, "k", budget // 4), costs.best(l, "v", budget // 4)) for l in range(2)]
    assert costs.total(found) <= costs.total(equal)


def test_a_plan_takes_no_more_bytes_than_the_equal_shares_that_its_budget_was_found_with():
    """Heads of 96 channels have 12 chunks, of whose bits 2 3/16 an element leave half a one."""
    dims, bits = kvq.CacheDims(3, 4, 2, 96, 384), 35 / 16
    spec = spec_of(widths_within(drawn(layers=3, chunks=12), bits, dims, 1024))
    ours, equal = (
        kvq.size.of(cache, dims, 1, 1024).resident for cache in (spec, f"waterfill:bits={bits}")
    )
    assert 0.99 * equal < ours <= equal


# --- measurements


@pytest.fixture(scope="module")
def planned(shallow, tmp_path_factory):
    """Return (model, tokens, calibration of waterfill, the model with it)."""
    llama, tokenizer = load_llama(shallow, dtype="float32")
    ids = np.asarray(tokenizer(PASSAGE.read_text(), verbose=False).input_ids, np.int32)
    calibration = calibrate(
        llama, ids, "waterfill", samples=2, length=128, work=tmp_path_factory.mktemp("work") / "w"
    )
    return llama, ids, calibration, prepare(llama, "waterfill", calibration)


@pytest.mark.parametrize(("layer", "side"), [(1, "k")])
def test_one_side_of_one_layer_costs_what_the_whole_cache_does_with_all_else_exact(
    planned, layer: int, side: str, monkeypatch: pytest.MonkeyPatch
):
    llama, ids, calibration, prepared = planned
    rows = np.stack([ids[at : at + 60] for at in (0, 300)])
    costs = costs_of(calibration, {})
    widths = costs.best(layer, side, 12)
    # the first layer attends to the token before
    windows = kvq.parse("waterfill:sink=0,recent=0,block=4")
    spec = one_side(spec_of([(widths, widths)] * 2), side, windows)
    measured = Sensitivity(llama, rows, 48, STEP)
    found = measured.kl(prepared, spec, layer)
    assert found.shape == (len(rows),)
    alone = dataclasses.replace(spec, skip_layers=(1 - layer,))
    (whole,) = measure_rows([(prepared, alone)], jnp.asarray(rows), prompt=48)
    np.testing.assert_allclose(found, whole.token_kl.mean(axis=1), rtol=1e-2)
    assert found.min() > 1e-4, "nothing was read from the body"
    coarse = one_side(spec_of([((1, *[0] * 7),) * 2] * 2), side, windows)
    assert (measured.kl(prepared, coarse, layer) > 1.5 * found).all()
    monkeypatch.setattr(sensitivity, "MAX_LOGITS", 5 * len(rows) * llama.config.vocab_size)
    in_parts = measured.kl(prepared, spec, layer)
    np.testing.assert_allclose(in_parts, found, rtol=1e-5)


@pytest.mark.parametrize("context", [1024, 2048])
@pytest.mark.parametrize("rival", ["turboquant:bits=3", "kivi:bits=2"])
def test_a_budget_of_bytes_reads_what_fits_it_and_one_of_bits_what_has_as_few(
    rival: str, context: int
):
    """waterfill pays for matrices: in as many bytes it has 0.6 to 1.4 stored bits fewer."""
    config, ours = open_checkpoint.read_config(EMBEDDED), kvq.parse("waterfill")
    spec = kvq.parse(f"{rival},sink={ours.sink},recent={ours.recent}")
    size = config, 1, context, "bfloat16"
    nbytes = kvq.size.of(spec, *size).resident
    stored = kvq.size.body_bits_per_element(spec, config)
    assert plan_budget.max_bits(nbytes, *size, Bases()) < stored

    def read(budget: Budget) -> list[kvq.cache.CacheSpec]:
        return measuring.rivals(config, lambda each: plan_budget.fits(budget, each, *size))

    for enough, too_few in (
        (Bytes(nbytes), Bytes(nbytes - 1)),
        (Bits(stored), Bits(stored - 1 / 16)),
    ):
        assert spec in read(enough)
        assert spec not in read(too_few)
        sizes = [kvq.size.body_bits_per_element(each, config) for each in read(enough)]
        assert sizes == sorted(sizes, reverse=True)
        methods = [type(each.k) for each in read(enough)]
        assert len(set(methods)) == len(methods), "only the largest of a method is read"


# --- files and the command


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "kvq"))
    return tmp_path / "kvq"


def test_a_plan_is_written_and_read_and_what_is_none_is_refused_in_one_line(tmp_path):
    written = kept.StoredPlan(
        kvq.parse("waterfill:k_widths=43210000@0/22110000,v_widths=32110000"),
        str(tmp_path / "w.safetensors"),
    )
    (tmp_path / "w.safetensors").write_text("of this plan")
    kept.write_plan(tmp_path / "plan.json", written)
    assert kept.read_plan(tmp_path / "plan.json") == written
    good = json.loads((tmp_path / "plan.json").read_text())
    for content, message in (
        ("{", "is not a plan of kvq"),
        ("[" * 9999, "is not a plan of kvq"),
        ("[]", "is not a plan of kvq"),
        (json.dumps(good | {"format": "other"}), "is not a plan of kvq"),
        (json.dumps(good | {"cache": 3}), "the text of a cache"),
        (json.dumps(good | {"calibration": 3}), "the text of a cache"),
        (json.dumps(good | {"calibration_sha256": 3}), "the text of a cache"),
        (json.dumps(good | {"cache": "nothing:bits=2"}), "unknown cache method 'nothing'"),
        (" " * (kept.MAX_BYTES + 1), "more than"),
    ):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            kept.read_plan(tmp_path / "plan.json")
        assert "\n" not in str(error.value)


def test_a_plan_whose_calibration_was_made_anew_is_refused_and_older_plans_are_read(tmp_path):
    """Another text orders channels otherwise, so the same widths would be another cache."""
    calibration, file = tmp_path / "waterfill.safetensors", tmp_path / "plan.json"
    calibration.write_text("of one text")
    written = kept.StoredPlan(kvq.parse("waterfill:k_widths=43210000"), str(calibration))
    kept.write_plan(file, written)
    calibration.write_text("of another text")
    with pytest.raises(ValueError, match="run the `kvq plan` that wrote it again") as error:
        kept.read_plan(file)
    assert "\n" not in str(error.value)
    older = json.loads(file.read_text())
    del older["calibration_sha256"]
    file.write_text(json.dumps(older))
    assert kept.read_plan(file) == written
    kept.write_plan(file, written)
    calibration.unlink()
    assert kept.read_plan(file) == written, "commands that need no calibration read it"


@pytest.fixture
def auto(planned, shallow, cache_folder):
    """Return a model whose calibration is stored for `auto`."""
    file = kept.calibration_file(str(shallow))
    file.parent.mkdir(parents=True)
    save_calibration(planned[2], file)
    return shallow


def test_auto_and_a_plans_file_are_the_cache_that_the_fast_plan_names(
    auto, run, run_json, tmp_path
):
    file = tmp_path / "plan.json"
    fast = run_json(f"plan {auto} --budget 2bits --out {file} --context 256")
    assert "k_widths" in fast["chosen"]
    request = f"generate {auto} --prompt='It was a dark and stormy night' --max-new-tokens=2"
    told = run_json(request, "--cache", fast["chosen"], "--calibration", fast["calibration"])
    for given in ("auto:bits=2", file):
        found = run_json(request, "--cache", given)
        assert found["cache"] == told["cache"] == fast["chosen"], given
        assert found["calibration"] == fast["calibration"]
        assert found["tokens"] == told["tokens"]
    memory = f"memory {auto} --cache auto:bits=2 --cache auto:bits=4 --context 256"
    sizes = run_json(memory)["caches"]
    assert sizes[0]["cache_bytes"] == fast["caches"][1]["bytes"] < sizes[1]["cache_bytes"]


def test_a_measured_plan_goes_on_from_what_was_measured_and_takes_the_cache_of_the_least_kl(
    shallow, cache_folder, run, run_json, tmp_path, monkeypatch
):
    monkeypatch.setattr(measuring, "MEASURED", (2.0,))
    monkeypatch.setattr(measuring, "RIVALS", ("turboquant:bits=1", "kivi:bits=2"))
    monkeypatch.setattr(plan, "LENGTH", 128)
    monkeypatch.setattr(request, "WHOLE", 1)
    text = tmp_path / "text.txt"
    text.write_text(PASSAGE.read_text() * 2)
    sizes = "--budget=2bits --window=284 --windows=1 --context=512 --key-basis=best"
    command = f"plan {shallow} --text={text} {sizes}"
    read, measure = list[str](), measuring.measure_rows

    def overflowing_first(candidates, *args, **sizes):
        names = [str(spec) for _, spec in candidates]
        read.extend(names)
        return [
            quality._replace(token_kl=quality.token_kl * (math.nan if name == read[0] else 1))
            for name, quality in zip(names, measure(candidates, *args, **sizes), strict=True)
        ]

    monkeypatch.setattr(measuring, "measure_rows", overflowing_first)
    found = run_json(command, "--out", tmp_path / "plan.json", "--picture", tmp_path / "plan.png")
    caches = {cache["name"]: cache for cache in found["caches"]}
    checked = {name: one for name, one in caches.items() if one["measured_kl"] is not None}
    assert set(read) - set(checked) == {read[0]}, "its predictions are not finite"
    both = {
        name: cache["measured_kl"] * cache["measured_kl_on_other_text"]
        for name, cache in checked.items()
    }
    assert found["chosen"] == min(both, key=lambda name: both[name])
    for name, cache in caches.items():
        if name not in checked:
            assert cache["compared_kl"] is cache["over_chosen"] is None
            continue
        assert cache["compared_kl"] == pytest.approx(math.sqrt(both[name])), "none has more exact"
        low, high = cache["over_chosen_interval"]
        if name == found["chosen"]:
            assert (cache["over_chosen"], low, high) == (1.0, None, None)
        else:
            assert low < cache["over_chosen"] < high
    assert found["other_text"] == CODE
    assert "turboquant:bits=1,sink=32,recent=96" in checked
    assert not any("kivi" in name for name in checked), "it has more bits than the budget"
    assert all(cache["body_bits_per_element"] <= 2 for cache in checked.values())
    ours = [name for name in checked if "waterfill" in name]
    assert {"key_basis=eigen" in name for name in ours} == {True, False}
    sides = {(side["key_basis"], side["layer"], side["side"]) for side in found["sides"]}
    assert sides == set(itertools.product(KEY_BASES, range(2), SIDES))
    assert found["prediction"]["factor"] >= 1
    assert kept.read_plan(tmp_path / "plan.json").spec == kvq.parse(found["chosen"])
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(Sensitivity, "kl", lambda *_: pytest.fail("a side was measured again"))
    monkeypatch.setattr(
        measuring, "measure_rows", lambda *_, **__: pytest.fail("a cache was read again")
    )
    anew = dict.fromkeys(("seconds", "out", "picture"))
    assert run_json(command) | anew == found | anew
    (code, out, _), words = run(*shlex.split(command)), "compared KL is the geometric mean over"
    assert (code, words in " ".join(out.split())) == (0, True)


def test_ratios_shrink_towards_the_mean_over_layers_before_a_budget_is_shared_out():
    energies = np.ones((2, 2, 8))
    ratios = {(0, "k"): {16: 1.0, 24: 5.0}, (1, "k"): {16: 100.0, 24: 5.0}, (1, "v"): {16: 3.0}}
    shrunk = Costs(energies, ratios).shrunk()
    assert shrunk.ratio(0, "k", 16) == pytest.approx(10**0.2)
    assert shrunk.ratio(1, "k", 16) == pytest.approx(10**1.8)
    assert shrunk.ratio(0, "k", 24) == shrunk.ratio(1, "k", 24) == pytest.approx(5)
    assert shrunk.ratio(1, "v", 16) == pytest.approx(3), "alone, it is the mean"
    assert Costs(energies, {}).shrunk().ratio(0, "v", 16) == 1.0


def test_costs_of_two_texts_have_a_geometric_mean():
    energies, side = np.ones((1, 2, 8)), (0, "k")
    text, other = (Costs(energies, {side: {16: ratio, 24: 1.0}}) for ratio in (1.0, 9.0))
    assert mean((text, other)).ratio(*side, 16) == pytest.approx(3)
    assert mean((text, other)).ratio(*side, 24) == pytest.approx(1)
    assert mean((other,)).ratio(*side, 16) == pytest.approx(9)


def test_sides_scales_and_checks_have_windows_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "WHOLE", 2)
    config = open_checkpoint.read_config(EMBEDDED)
    ids = np.arange(20000, dtype=np.int32)
    asked = PlanRequest(ids[:12000], ids[12000:], 300, 300, 3, 2, 512)
    kinds = "sides", "scale", "check"
    rows = {one: asked.rows(*one) for one in itertools.product(request.TEXTS, kinds)}
    assert [len(every) for every in rows.values()] == 2 * [3, 6, 6]
    tokens = np.concatenate([every.reshape(-1) for every in rows.values()])
    assert len(set(tokens.tolist())) == 30 * 300, "a token is in two of them"
    for (text, kind), every in rows.items():
        first, last = ((6000, 12000), (12000, 20000))[text]
        assert first <= every.min() <= every.max() < last, f"{kind}: calibrated on, or another text"
    for one, every in rows.items():
        opened = asked._replace(bos=0).rows(*one)
        assert (opened[:, 0] == 0).all(), f"{one}: a text that begins with the token that opens it"
        np.testing.assert_array_equal(opened[:, 1:], every[:, 1:], err_msg=str(one))
    with pytest.raises(ValueError, match="has 8999 tokens, and a plan needs at least 9000"):
        asked._replace(ids=ids[:8999]).check(config)
    with pytest.raises(ValueError, match="--other-text has 4499 tokens, and 15 windows of 300"):
        asked._replace(other=ids[:4499]).check(config)
    asked._replace(ids=ids[:9000], other=ids[:4500]).check(config)


def test_checks_have_as_much_text_before_them_as_no_other_window_has(monkeypatch):
    monkeypatch.setattr(request, "WHOLE", 1)
    monkeypatch.setattr(request, "RECENTS", (20, 200))
    ids = np.arange(6000, dtype=np.int32)
    short = PlanRequest(np.zeros(12000, np.int32), ids, 300, 300, 3, 2, 512)
    long = short._replace(longest=9999)
    assert (short.checked, short.recents) == (300, (20,))
    assert (long.checked, long.recents) == ((6000 - 300) // 8, (20,)), "200 need a prompt of 800"
    assert long._replace(windows=2).recents == (20, 200)
    before, after = (asked.rows(1, "check") for asked in (short, long))
    np.testing.assert_array_equal(after[:, -300:], before)
    others = [long.rows(1, kind).reshape(-1) for kind in ("sides", "scale")]
    assert not set(after.reshape(-1).tolist()) & set(np.concatenate(others).tolist())


def test_a_cache_with_more_of_the_prompt_exact_must_have_less_kl_than_others():
    usual, wider, too_little = (
        measuring.Checked(kvq.parse(f"kivi:recent={recent}"), ((kl,), (4 * kl,)), None, share)
        for recent, kl, share in ((96, 1.0, 0.0), (608, 0.6, 0.25), (608, 0.7, 0.25))
    )
    assert usual.compared == pytest.approx(2.0), "without a larger share it is the KL"
    assert wider.compared == pytest.approx(1.8)
    assert wider.compared < usual.compared < too_little.compared


def test_caches_are_told_apart_by_the_ratios_of_their_windows_as_they_are_compared():
    spec = kvq.parse("kivi")
    hard, easy = (8.0, 1.0), (0.5, 0.1)  # what makes a window hard for both cancels
    chosen = measuring.Checked(spec, (hard, easy), None, 0.0)
    close, far = (
        measuring.Checked(spec, tuple(zip(*pairs, strict=True)), None, 0.25)
        for pairs in (
            [(8.0 * 1.2, 0.5 * 0.5), (1.0 * 0.6, 0.1 * 1.1)],
            [(8.0 * 1.9, 0.5 * 2.1), (1.0 * 2.0, 0.1 * 2.0)],
        )
    )
    value, (low, high) = far.over(chosen)
    assert value == pytest.approx(1.5 * (1.9 * 2.1 * 2 * 2) ** 0.25), (
        "with a share of 1/4, 1.5 times"
    )
    assert 1 < low < value < high < 4
    low, high = close.over(chosen).interval
    assert low < 1 < high
    infinite = measuring.Checked(spec, ((math.inf, 1.0), easy), None, 0.0)
    assert math.isnan(infinite.over(chosen).value)
    rows = [plan_rows.measured(one, chosen) for one in (chosen, close, far, infinite)]
    names = ["kivi", "innerq", "int4", "squat"]
    caches = [row | {"name": name} for row, name in zip(rows, names, strict=True)]
    told = plan_table.comparison({"chosen": "kivi", "caches": caches})
    assert "not told apart from innerq (95 %" in told
