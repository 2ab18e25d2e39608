"""Plans with other bases of keys and values: costs, sizes and the choice between them."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.attention import Attention
from kvq_jax.methods.waterfill import Waterfill
from kvq_models import EMBEDDED, load_llama, prepare, resolved, save_llama
from kvq_models.calibration.file import Calibration, Origin, predicted_divergence
from kvq_models.inference.method_parameters import parameters_for
from kvq_tools.cli import plan_budget
from kvq_tools.cli.commands import plan
from kvq_tools.cli.options.plan import Bytes
from kvq_tools.planning import kept, measuring, request
from kvq_tools.planning.allocation import SIDES, costs_of, shared_out
from kvq_tools.planning.defaults import KEY_BASES, VALUE_BASES, Bases
from kvq_tools.planning.unmeasured import planned

PASSAGE = Path(__file__).parents[3] / "kvq_tools" / "cli" / "passage.txt"
LAYERS = 4
DIMS = kvq.CacheDims(LAYERS, 2, 1, 64, 128)


BASES = tuple(itertools.starmap(Bases, itertools.product(KEY_BASES, VALUE_BASES)))
PREDICTED = tuple(bases for bases in BASES if bases.predicted)


def calibration(bases: Bases, dims: kvq.CacheDims = DIMS) -> Calibration:
    rng = np.random.default_rng(0)
    channels = {"k": 32 if bases.keys == "pairs" else 64, "v": 64}
    tensors = {
        f"layers.{layer}.{side}.energies": -np.sort(-np.exp(rng.normal(0, 2, (1, channels[side]))))
        for layer in range(LAYERS)
        for side in SIDES
        if side == "k" or bases.predicted
    }
    keys = {name.removesuffix(".energies"): "" for name in tensors}
    origin = Origin("text", "", 1, 128, 0, "float32", 1.0)
    return Calibration(bases.spec(), dims, "", keys, origin, tensors)


def method_of(spec: CacheSpec | str) -> Waterfill:
    method = kvq.parse(spec).k
    assert isinstance(method, Waterfill)
    return method


@pytest.mark.parametrize("bases", PREDICTED)
def test_costs_of_sides_add_up_to_the_divergence_that_the_method_predicts(bases: Bases):
    fitted = calibration(bases)
    spec = resolved(bases.spec(2.5), fitted)
    widths = [
        [method_of(spec).widths(side, layer, DIMS) for side in SIDES] for layer in range(LAYERS)
    ]
    assert costs_of(fitted, {}).total(widths) == pytest.approx(predicted_divergence(spec, fitted))
    (other,) = set(PREDICTED) - {bases}
    assert costs_of(calibration(other), {}).total(widths) != pytest.approx(
        predicted_divergence(spec, fitted)
    )


def test_measured_values_in_a_rotation_get_bits_by_their_costs_and_equal_widths():
    """Layer 0's values cost 64 times those of the other layers, so it gets 3 bits more."""
    bases = Bases("eigen", "rotation")
    ratios = {(layer, "v"): {20: 64.0 if layer == 0 else 1.0} for layer in range(LAYERS)}
    costs = costs_of(calibration(bases), ratios | {(i, "k"): {20: 1e-3} for i in range(LAYERS)})
    values = [values for _, values in shared_out(costs, budget=2 * LAYERS * costs.chunks * 3)]
    assert all(max(widths) - min(widths) <= 1 for widths in values), values
    means = [sum(widths) / len(widths) for widths in values]
    assert means[0] - np.mean(means[1:]) == pytest.approx(3, abs=0.5), means


def test_widths_of_windowed_layers_keep_the_bases():
    layers = tuple(Attention(window=256 if layer else None) for layer in range(LAYERS))
    dims = kvq.CacheDims(LAYERS, 2, 1, 64, 128, attention=layers)
    for bases in BASES:
        asked = kvq.parse(bases.spec(3))
        spec = planned(asked, calibration(bases, dims), dims, 8192)
        assert Bases.of(method_of(spec)) == bases
        assert method_of(spec).k_widths, bases


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "kvq"))
    monkeypatch.setattr(plan, "LENGTH", 128)


def test_a_plan_without_measurements_counts_and_chooses_both_bases(shallow, cache_folder, run_json):
    best = "plan", shallow, "--key-basis=best", "--context=512", "--budget=2bits"
    found = run_json(*best, "--fast", f"--text={PASSAGE}")
    rows = {one["name"]: one for one in found["caches"] if one["bits"] == 2.0}
    assert {Bases.of(method_of(name)) for name in rows} == set(PREDICTED)
    bases = Bases.of(method_of(found["chosen"]))
    assert found["chosen"] == min(rows, key=lambda name: rows[name]["predicted_kl"])
    assert found["calibration"] == str(kept.calibration_file(str(shallow), bases))
    kept_before = run_json(*best)
    assert kept_before["caches"] == found["caches"], "from what the first command kept"
    auto = run_json("memory", shallow, "--cache=auto:bits=2,key_basis=eigen", "--context=512")
    (name,) = (name for name in rows if "eigen" in name)
    assert auto["caches"][0]["cache_bytes"] == rows[name]["bytes"]

    file = kept.calibration_file(str(shallow), Bases("eigen"))
    alone = run_json("plan", shallow, "--context=512", "--budget=2bits", "--calibration", file)
    assert alone["chosen"] == name, "a calibration decides its basis"

    spec, llama = kvq.parse(name), load_llama(shallow, dtype="float32")[0]
    prepared = prepare(llama, spec, str(file))
    cache = kvq.init_cache(spec, llama.config, 1, 512, "bfloat16")
    assert kvq.size.nbytes(cache) == rows[name]["bytes"]
    added = sum(array.nbytes for array in jax.tree.leaves(parameters_for(prepared, spec)))
    alone = rows[name]["resident_by_batch"][0]
    assert alone == {"batch": 1, "bytes": rows[name]["bytes"] + added}


def test_other_weights_at_the_same_path_are_calibrated_anew(
    shallow, tmp_path, cache_folder, run_json
):
    model = shutil.copytree(shallow, tmp_path / "model")
    command = "plan", model, "--context=512", "--budget=2bits", "--fast"

    def calibration_of_a_plan() -> bytes:
        return Path(run_json(*command, f"--text={PASSAGE}")["calibration"]).read_bytes()

    first = calibration_of_a_plan()
    assert calibration_of_a_plan() == first, "it was not kept"
    llama, tokenizer = load_llama(model, dtype="float32")
    embedding = llama.embed[...]
    llama.embed[...] = embedding[::-1]
    llama.norm.scale[...] = 2 * llama.norm.scale[...]
    save_llama(llama, model, tokenizer)
    other = calibration_of_a_plan()
    assert other != first
    kept.calibration_file(str(model)).write_bytes(first[:1000])
    assert calibration_of_a_plan() == other, "a damaged file was not made again"


def test_bits_of_a_budget_of_bytes_pay_for_the_matrices():
    config = load_llama(EMBEDDED)[0].config

    pairs, eigen = PREDICTED

    def size(bits: float, bases: Bases, context: int) -> int:
        return kvq.size.of(bases.spec(bits), config, 1, context, "bfloat16").resident

    def budgets(budget: int, context: int) -> dict[Bases, float]:
        return plan_budget.budgets(Bytes(budget), PREDICTED, config, 1, context, "bfloat16")

    budget = size(2, pairs, 8192)
    bits = budgets(budget, 8192)
    assert bits[eigen] < bits[pairs] == 2.0
    for bases, maximum in bits.items():
        assert size(maximum, bases, 8192) <= budget < size(maximum + 1 / 8, bases, 8192), bases
    assert budgets(size(2, pairs, 512), 512) == {pairs: 2.0}, "the matrices do not fit"


def test_a_calibration_is_no_choice_between_two_bases(shallow, run):
    request = "plan", shallow, "--budget=2bits", "--key-basis=best", "--calibration=w.safetensors"
    code, _, err = run(*request)
    assert code != 0
    assert err.splitlines()[-1].endswith("and --calibration is one: leave it out")


def resident(described: dict[str, Any]) -> int:
    """Return the resident bytes of one sequence."""
    return described["resident_by_batch"][0]["bytes"]


def test_a_plan_measures_values_in_a_rotation_and_auto_finds_it(
    shallow, cache_folder, run_json, run, monkeypatch, tmp_path
):
    monkeypatch.setattr(measuring, "MEASURED", (2.0,))
    monkeypatch.setattr(measuring, "RIVALS", ())
    monkeypatch.setattr(request, "WHOLE", 1)
    monkeypatch.setattr(request, "RECENTS", (128,))
    monkeypatch.setattr(request, "LONGER", 1)  # a prompt of 160 tokens is long enough
    text = tmp_path / "text.txt"
    text.write_text(PASSAGE.read_text() * 2)
    sizes = "--window=284", "--windows=1", "--context=1024", "--budget=2bits"
    asked = "--key-basis=eigen", "--value-basis=rotation"
    found = run_json("plan", shallow, f"--text={text}", *sizes, *asked)
    chosen, rotated = method_of(found["chosen"]), Bases("eigen", "rotation")
    assert Bases.of(chosen) == rotated
    assert chosen.k_widths
    sides = {(one["side"], one["key_basis"], one["value_basis"]) for one in found["sides"]}
    assert sides == {(side, *rotated) for side in SIDES}
    checked = [one for one in found["caches"] if one["measured_kl"] is not None]
    levels = [one["predicted_kl"] for one in found["caches"] if one["measured_kl"] is None]
    assert levels == sorted(levels, reverse=True), "a larger budget costs less KL"
    wider = [one for one in checked if kvq.parse(one["name"]).recent == 128]
    checked = [one for one in checked if one not in wider]
    assert len(checked) == 2, "equal shares and those of the costs"
    (wider,) = wider
    assert resident(wider) <= max(map(resident, checked)), "more exact tokens cost no bytes"
    assert wider["body_bits_per_element"] < checked[0]["body_bits_per_element"]

    auto = f"--cache=auto:{rotated.spec(2).partition(':')[2]}"
    (named,) = run_json("memory", shallow, auto, "--context=1024")["caches"]
    assert named["cache_bytes"] == min(one["bytes"] for one in checked), "without its text"
    alone = run_json("plan", shallow, *sizes[2:], "--calibration", found["calibration"])
    assert Bases.of(method_of(alone["chosen"])) == rotated, "a calibration decides its bases"
    assert {one["predicted_kl"] for one in alone["caches"]} == {None}
    _, out, _ = run("plan", shallow, *sizes[2:], "--calibration", found["calibration"])
    assert "values in a rotation have no prediction of KL" in out
    assert out.count("k_widths") == 1, "widths are in the last line alone"

    code, _, err = run("plan", shallow, *sizes[2:], "--key-basis=eigen", "--value-basis=best")
    assert code
    assert "values in a rotation have no prediction to compare" in err.splitlines()[-1]
    code, _, err = run("generate", EMBEDDED, "--prompt=It", auto)
    assert code
    assert "--key-basis eigen --value-basis rotation` keeps one" in err.splitlines()[-1]
