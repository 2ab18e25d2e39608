"""`kvq memory --budget` without a cache: what fits, from config.json alone, with measured KL."""

import json

import jax
import pytest

import kvq_jax as kvq
from benchmarks import measured_caches
from kvq_models.llama.checkpoint import read_config
from kvq_models.llama.model import abstract_llama
from kvq_tools.cli.console import format_bytes
from kvq_tools.planning import measured
from tests.kvq_models.checkpoints import tiny_config

ACCUMULATING = "xquant_cl:bits=2,sink=4,recent=32,block=32"  # has working memory beside the cache
ASKED = ("--context", "4K", "--batch", 8)

# Each command counts 63 caches; the types of what counts them are checked in tests/kvq_jax.
pytestmark = pytest.mark.usefixtures("types_unchecked")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a config.json of four layers, alone in its folder."""
    dims = {"head_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    path = tmp_path_factory.mktemp("alone") / "config.json"
    path.write_text(json.dumps(tiny_config(max_position_embeddings=8192, **dims).to_hf()))
    return path


def size(config, name, context=4096):
    return kvq.size.of(name, read_config(config.parent), 8, context).resident


@pytest.fixture(scope="module")
def sizes(config):
    names = ("dense", *(cache.name for cache in measured.measurements().caches))
    return {name: size(config, name) for name in names}


def test_what_fits_is_counted_in_resident_bytes(config, sizes, run_json):
    budget = sizes[ACCUMULATING] - 1
    found = run_json("memory", config, "--budget", budget, *ASKED)
    fits = {cache["name"]: cache["fits"] for cache in found["caches"]}
    assert fits == {name: resident <= budget for name, resident in sizes.items()}
    assert True in fits.values()
    stored = {cache["name"]: cache["cache_bytes"] for cache in found["caches"]}
    assert stored[ACCUMULATING] <= budget, (
        "the cache alone does not fit either: the test shows nothing"
    )
    classes = [-1 if c["kl_class"] is None else c["kl_class"] for c in found["caches"]]
    assert classes == sorted(classes), "the best caches come first"


def test_the_table_names_a_class_and_the_needs_of_a_plan(config, run):
    code, out, _ = run("memory", config, "--budget", "100GiB", *ASKED)
    assert code == 0
    every = 1 + len(measured.measurements().caches)  # dense, too
    assert f"{every} of {every} measured caches fit" in out
    assert "│ exact" in out, "dense fits, too"
    assert "below 0.003" in out
    assert f"{every - 12} more fit" in out
    assert f"kvq plan {config.parent} --text FILE --budget 100GiB --context 4096" in out


@pytest.mark.parametrize("typed", ["8000000", "'9 MB'", "0"])
def test_the_plan_that_the_table_names_has_the_budget_that_was_typed(typed, config, run):
    out = run("memory", config, "--budget", typed.strip("'"), *ASKED)[1]
    assert f" --budget {typed} --context" in " ".join(out.split())


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_weights_are_said_beside_the_budget(config, run, run_json, dtype, width):
    asked = "memory", config, "--budget", "100GiB", "--dtype", dtype
    weights = jax.tree.leaves(abstract_llama(read_config(config.parent)))
    expected = width * sum(weight.size for weight in weights)
    for cache in ((), ("--cache", "kivi:bits=2")):
        assert run_json(*asked, *cache)["weight_bytes"] == expected
        _, out, _ = run(*asked, *cache)
        assert f"The weights take {format_bytes(expected)} more in {dtype}." in " ".join(
            out.split()
        )


def test_if_nothing_fits_the_table_says_what_would(config, sizes, run, run_json):
    budget = min(sizes.values()) // 2
    found = run_json("memory", config, "--budget", budget, *ASKED)["caches"]
    longest = {one["name"]: one["largest_context"] for one in found}
    longest = {name: context for name, context in longest.items() if context is not None}
    assert len(longest) == 5
    assert any(longest.values())
    for name, context in longest.items():
        assert budget < size(config, name, context + 1), name
        assert not context or size(config, name, context) <= budget, name
    assert "no measured cache fits" in run("memory", config, "--budget", budget, *ASKED)[1]


def test_a_cache_that_stops_growing_has_room_for_any_context(tmp_path, run, run_json):
    """Every layer keeps its window alone: no budget ends its context."""
    family = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    fields = tiny_config().to_hf() | family | {"sliding_window": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = "memory", tmp_path, "--cache", "kivi:bits=2", "--budget", "1GiB"
    (cache,) = run_json(*asked)["caches"]
    assert cache["largest_context"] == 2**31 - 1
    assert "│     any │" in run(*asked)[1]


def test_the_measured_caches_are_those_of_the_committed_results():
    made = measured_caches.contents(measured_caches.read())
    assert measured_caches.FILE.read_text(encoding="utf-8") == made, (
        "run python -m benchmarks.results_page"
    )
    for cache in measured.measurements().caches:
        assert (cache.spec.sink, cache.spec.recent) == (4, 32), cache.name


def test_a_class_is_decided_by_the_harder_text():
    spec = kvq.parse("kivi:bits=2")
    for kl, words in (
        ((0.001, 0.0029), "below 0.003"),
        ((0.02, 0.001), "0.01 to 0.03"),
        ((0.3, 0.1), "0.3 or more"),
    ):
        cache = measured.MeasuredCache("", spec, kl)
        assert measured.class_in_words(cache.kl_class) == words
