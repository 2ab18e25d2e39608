"""Plans with keys in an eigenbasis: costs, sizes and the choice between bases."""

from pathlib import Path

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.attention import Attention
from kvq_jax.methods.waterfill import Waterfill
from kvq_models import EMBEDDED, load_llama, prepare, resolved
from kvq_models.calibration.file import Calibration, Origin, predicted_divergence
from kvq_models.inference.method_parameters import parameters_for
from kvq_tools.cli.commands import plan
from kvq_tools.planning import kept
from kvq_tools.planning.allocation import SIDES, costs_of
from kvq_tools.planning.defaults import BASES
from kvq_tools.planning.unmeasured import planned

PASSAGE = Path(__file__).parents[3] / "kvq_tools" / "cli" / "passage.txt"
LAYERS = 4
DIMS = kvq.CacheDims(LAYERS, 2, 1, 64, 128)


def calibration(basis: str, dims: kvq.CacheDims = DIMS) -> Calibration:
    rng = np.random.default_rng(0)
    channels = {"k": 32 if basis == "pairs" else 64, "v": 64}
    tensors = {
        f"layers.{layer}.{side}.energies": -np.sort(-np.exp(rng.normal(0, 2, (1, channels[side]))))
        for layer in range(LAYERS)
        for side in SIDES
    }
    keys = {name.removesuffix(".energies"): "" for name in tensors}
    origin = Origin("text", "", 1, 128, 0, "float32", 1.0)
    return Calibration(f"waterfill:key_basis={basis}", dims, "", keys, origin, tensors)


def method_of(spec: CacheSpec | str) -> Waterfill:
    method = kvq.parse(spec).k
    assert isinstance(method, Waterfill)
    return method


@pytest.mark.parametrize("basis", BASES)
def test_costs_of_sides_add_up_to_the_divergence_that_the_method_predicts(basis: str):
    fitted = calibration(basis)
    spec = resolved(f"waterfill:bits=2.5,key_basis={basis}", fitted)
    widths = [
        [method_of(spec).widths(side, layer, DIMS) for side in SIDES] for layer in range(LAYERS)
    ]
    assert costs_of(fitted, {}).total(widths) == pytest.approx(predicted_divergence(spec, fitted))
    other = "eigen" if basis == "pairs" else "pairs"
    assert costs_of(calibration(other), {}).total(widths) != pytest.approx(
        predicted_divergence(spec, fitted)
    )


def test_widths_of_windowed_layers_keep_the_basis():
    layers = tuple(Attention(window=256 if layer else None) for layer in range(LAYERS))
    dims = kvq.CacheDims(LAYERS, 2, 1, 64, 128, attention=layers)
    for basis in BASES:
        asked = kvq.parse(f"waterfill:bits=3,key_basis={basis}")
        spec = planned(asked, calibration(basis, dims), dims, 8192)
        assert method_of(spec).key_basis == basis


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "kvq"))
    monkeypatch.setattr(plan, "LENGTH", 128)


def test_a_plan_without_measurements_counts_and_chooses_both_bases(shallow, cache_folder, run_json):
    best = "plan", shallow, "--key-basis=best", "--context=512", "--budget=2bits"
    found = run_json(*best, "--fast", f"--text={PASSAGE}", "--window=284")
    rows = {one["name"]: one for one in found["caches"] if one["bits"] == 2.0}
    assert {method_of(name).key_basis for name in rows} == set(BASES)
    basis = method_of(found["chosen"]).key_basis
    assert found["chosen"] == min(rows, key=lambda name: rows[name]["predicted_kl"])
    assert found["calibration"] == str(kept.calibration_file(str(shallow), basis))
    kept_before = run_json(*best)
    assert kept_before["caches"] == found["caches"], "from what the first command kept"
    auto = run_json("memory", shallow, "--cache=auto:bits=2,key_basis=eigen", "--context=512")
    (name,) = (name for name in rows if "eigen" in name)
    assert auto["caches"][0]["cache_bytes"] == rows[name]["bytes"]

    file = kept.calibration_file(str(shallow), "eigen")
    alone = run_json("plan", shallow, "--context=512", "--budget=2bits", "--calibration", file)
    assert alone["chosen"] == name, "a calibration decides its basis"

    spec, llama = kvq.parse(name), load_llama(shallow, dtype="float32")[0]
    prepared = prepare(llama, spec, str(file))
    cache = kvq.init_cache(spec, llama.config, 1, 512, "bfloat16")
    assert kvq.size.nbytes(cache) == rows[name]["bytes"]
    added = sum(array.nbytes for array in jax.tree.leaves(parameters_for(prepared, spec)))
    alone = rows[name]["resident_by_batch"][0]
    assert alone == {"batch": 1, "bytes": rows[name]["bytes"] + added}


def test_bits_of_a_budget_of_bytes_pay_for_the_matrices():
    config = load_llama(EMBEDDED)[0].config

    def size(bits: float, basis: str, context: int) -> int:
        spec = f"waterfill:bits={bits},key_basis={basis}"
        return kvq.size.of(spec, config, 1, context, "bfloat16").resident

    def budgets(budget: int, context: int) -> dict[str, float]:
        return plan.budgets(budget, BASES, config, 1, context, "bfloat16")

    budget = size(2, "pairs", 8192)
    bits = budgets(budget, 8192)
    assert bits["eigen"] < bits["pairs"] == 2.0
    for basis, most in bits.items():
        assert size(most, basis, 8192) <= budget < size(most + 1 / 8, basis, 8192), basis
    assert budgets(size(2, "pairs", 512), 512) == {"pairs": 2.0}, "the matrices do not fit"


def test_a_calibration_is_no_choice_between_two_bases(shallow, run):
    request = "plan", shallow, "--budget=2bits", "--key-basis=best", "--calibration=w.safetensors"
    code, _, err = run(*request)
    assert code != 0
    assert err.splitlines()[-1].endswith("and --calibration is one: leave it out")
