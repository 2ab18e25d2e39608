"""`kvq memory` and `kvq doctor` on caches that rebuild keys and values: the roofline, memory beside
the cache, the layers."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.peak_rates import DEVICES
from kvq_jax.types.pytree import describe
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.layer_weights import layer_weights
from kvq_models.llama.model import abstract_llama
from kvq_tools.cli import memory_roofline
from tests.kvq_models.checkpoints import SIZES, random_llama, tiny_config

LLAMA_2_7B = dict(intermediate_size=11008, num_key_value_heads=32)
LLAMA_3_1_8B = dict(intermediate_size=14336, num_key_value_heads=8)
D, HEADS, LAYERS = 4096, 32, 4


@pytest.fixture
def shapes(tmp_path):
    """shapes(sizes) -> a directory with only the config.json of a model of that width and four
    layers."""

    def write(sizes):
        fields = dict(
            model_type="llama",
            hidden_size=D,
            num_attention_heads=HEADS,
            num_hidden_layers=LAYERS,
            max_position_embeddings=4096,
        )
        (tmp_path / "config.json").write_text(json.dumps(SIZES | fields | sizes))
        return tmp_path

    return write


def test_the_papers_length_is_printed_for_its_model(shapes, run, run_json):
    device = "h100-pcie"
    arguments = ("memory", shapes(LLAMA_3_1_8B), "--cache", "xquant:bits=2", "--roofline", device)
    found = run_json(*arguments)
    (cache,) = found["caches"]
    length = cache["roofline"]["paper_hidden_tokens"]
    assert float(f"{length:.3g}") == 40.6e3, f"{length=}"
    assert found["device"]["ridge"] == DEVICES[device].ridge
    out = run(*arguments)[1]
    assert f"by the paper's equation {length:.0f}" in out
    assert device in out


@pytest.mark.parametrize(
    ("sizes", "width"), [(LLAMA_2_7B, D), (LLAMA_3_1_8B, 1024)], ids=["x", "latents"]
)
def test_here_keys_are_rebuilt_and_stored_bytes_are_read(sizes, width, shapes, run_json):
    (cache,) = run_json("memory", shapes(sizes), "--cache", "xquant:bits=2", "--roofline")["caches"]
    kv_width = sizes["num_key_value_heads"] * 128
    bodies = 1 if width == D else 2
    weights = 2 * (2 * D * D + 2 * D * kv_width + 3 * D * sizes["intermediate_size"])
    factors = 0 if width == D else 2 * (2 * width * kv_width + 4 * width)  # B and S of both sides
    for layer in cache["roofline"]["layers"]:
        assert layer["here"]["flops_per_token"] == 2 * width * kv_width + 2 * HEADS * width
        assert layer["here"]["cache_bytes_per_token"] == bodies * width * 2.25 / 8, (
            "2 bits, scale and zero of groups of 128"
        )
        assert layer["here"]["weight_bytes"] == weights + factors
    here = cache["roofline"]["layers"][0]["here"]
    ridge = 378
    expected = (
        ridge
        * here["weight_bytes"]
        / (here["flops_per_token"] - ridge * here["cache_bytes_per_token"])
    )
    assert cache["roofline"]["hidden_tokens"] == pytest.approx(expected)
    assert cache["roofline"]["hidden_tokens"] > 1.9 * cache["roofline"]["paper_hidden_tokens"], (
        "values need not be rebuilt"
    )


def test_an_accumulator_is_read_and_written_and_the_tightest_layer_decides(shapes, run_json):
    (cache,) = run_json(
        "memory", shapes(LLAMA_3_1_8B), "--cache", "xquant_cl:bits=2", "--roofline"
    )["caches"]
    early, _, base, delta = (layer["here"] for layer in cache["roofline"]["layers"])
    assert early["cache_bytes_per_token"] == 2 * 1024 * 4.25 / 8
    assert base["cache_bytes_per_token"] == D * 4.25 / 8 + 2 * 4 * D
    assert delta["cache_bytes_per_token"] == 2048 * 2.25 / 8 + 3 * 4 * D
    assert delta["flops_per_token"] == 2 * D * 1024 + 2 * HEADS * D + 2 * 2048 * D
    lengths = [layer["here"]["hidden_tokens"] for layer in cache["roofline"]["layers"]]
    assert lengths[2] is None, "the base layer reads longer than it computes, at any length"
    assert cache["roofline"]["hidden_tokens"] == min(
        length for length in lengths if length is not None
    )


def test_flops_are_those_of_the_compiled_attention():
    kv_heads = 2
    tokens, group, head_dim = 256, 8 // kv_heads, 64
    sizes = dict(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    config = tiny_config(num_hidden_layers=1, **sizes)
    (plan,) = kvq.cache.layout("xquant:bits=2", config, 1, tokens, "float32").plans
    params = plan.from_weights(layer_weights(abstract_llama(config, "float32").layers[0]))
    frequencies, factor = (
        jax.ShapeDtypeStruct((head_dim // 2,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    rope = describe(kvq.types.Rope, inverse_frequencies=frequencies, attention_factor=factor)
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def counted(read, codec, parameters, rows):
        body = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)),
            codec.body(1, kv_heads, tokens),
        )
        lowered = jax.jit(lambda *arrays: read(codec)(arrays[0], (), *arrays[1:])).lower(
            parameters, rows, body, positions, rope
        )
        return lowered.compile().cost_analysis()["flops"] / tokens

    keys = counted(
        lambda codec: codec.scores,
        plan.k,
        params[0],
        jax.ShapeDtypeStruct((1, kv_heads, group, head_dim), jnp.float32),
    )
    values = counted(
        lambda codec: codec.weighted,
        plan.v,
        params[1],
        jax.ShapeDtypeStruct((1, kv_heads, group, tokens), jnp.float32),
    )
    expected = memory_roofline.layer_cost(plan, config, 0).flops_per_token
    assert keys + values == pytest.approx(expected, rel=0.15), (
        "decoding, RoPE and the scores themselves are the rest"
    )
    width = plan.row_width
    assert values < 2 * width * kv_heads * head_dim / 3, "values are not rebuilt"


def test_what_rebuilds_nothing_says_so_and_one_side_may_be_rebuilt_alone(shapes, run, run_json):
    directory = shapes(LLAMA_3_1_8B)
    caches = [
        part
        for spec in ("kivi:bits=2", "k=xquant:bits=2+v=kivi:bits=2", "dense")
        for part in ("--cache", spec)
    ]
    kivi, mixed, dense = run_json("memory", directory, *caches, "--roofline")["caches"]
    for cache in (kivi, dense):
        assert (cache["roofline"]["rebuilds"], cache["roofline"]["hidden_tokens"]) == (False, None)
    assert mixed["roofline"]["layers"][0]["here"]["flops_per_token"] == 2 * 1024 * 1024
    assert mixed["roofline"]["paper_hidden_tokens"] is None
    out = run("memory", directory, *caches, "--roofline")[1]
    assert out.count("attention reads codes directly and rebuilds nothing") == 2


def test_parameters_and_working_memory_are_those_of_a_prepared_model(tmp_path, run, run_json):
    config = tiny_config(
        num_attention_heads=8, num_key_value_heads=2, head_dim=8, num_hidden_layers=4
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    specs = ("xquant:bits=2", "xquant_cl:bits=2", "kivi:bits=2,group_size=8")
    caches = [part for spec in specs for part in ("--cache", spec)]
    found = run_json(
        "memory", tmp_path, *caches, "--context", "512", "--batch", "3", "--dtype", "float32"
    )["caches"]
    llama = random_llama(config)
    model_leaves = {id(leaf) for leaf in jax.tree.leaves(llama)}
    for spec, cache in zip(specs, found, strict=True):
        parameters = jax.tree.leaves(prepare(llama, kvq.parse(spec)).cache_parameters)
        added = {
            id(leaf): leaf for leaf in parameters if id(leaf) not in model_leaves and leaf.ndim
        }
        assert cache["parameter_bytes"] == kvq.size.nbytes(list(added.values())), spec
    working = [cache["working_bytes"] for cache in found]
    body = kvq.parse("xquant_cl:bits=2").regions(512).body_capacity
    assert working == [0, 3 * body * 64 * 4, 0], "an accumulator [B, S, D] in fp32"
    assert found[0]["parameter_bytes"] == 4 * 4 * 2 * (16 * 16 + 16), (
        "B and S of both sides in four layers"
    )
    for cache in found:
        one, three, many = cache["resident_by_batch"]
        added = 3 * one["bytes"] - three["bytes"]
        assert added == 2 * cache["parameter_bytes"], "parameters do not grow with the batch"
        assert many["bytes"] == 16 * one["bytes"] - 15 * cache["parameter_bytes"]
        assert three["bytes"] == cache["resident_bytes"]
        assert cache["resident_bytes"] == (
            cache["cache_bytes"] + cache["parameter_bytes"] + cache["working_bytes"]
        )
    out = run("memory", tmp_path, *caches, "--context", "512")[1]
    assert np.all([part in out for part in ("resident", "batch 1", "batch 16")])
    assert "beside the cache" in out
    assert np.all([part in out for part in ("parameters", "working memory")])


@pytest.mark.parametrize(
    ("sizes", "sides", "bits"),
    [(LLAMA_2_7B, ["kv"], 1.125), (LLAMA_3_1_8B, ["k", "v"], 2.25)],
    ids=["x", "latents"],
)
def test_doctor_describes_rows_that_serve_both_sides_once(
    sizes, sides, bits, shapes, run, run_json
):
    arguments = ("doctor", shapes(sizes), "--cache", "xquant:bits=2,skip_layers=0")
    found = run_json(*arguments)
    skipped, *others = found["layers"]
    assert (skipped["quantized"], "k" in skipped, "v" in skipped) == (False, True, True)
    for layer in others:
        assert [side for side in ("k", "v", "kv") if side in layer] == sides
        assert {layer[side]["stored_bits"] for side in sides} == {bits}, (
            "of an element of keys or values"
        )
        assert "rebuilt" in layer["no_kernel"]
    assert "made from the weights" in found["facts"]["calibration"]
    out = run(*arguments)[1]
    assert ("from the same rows" in out) == (sides == ["kv"])


def test_doctor_says_where_qk_norm_is_applied(tmp_path, run_json):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3").to_hf()))
    rebuilt, cached = (
        run_json("doctor", tmp_path, "--cache", spec)["facts"]
        for spec in ("xquant", "kivi:group_size=8")
    )
    assert rebuilt["qk_norm"] == "yes; applied when keys are rebuilt"
    assert cached["qk_norm"] == "yes; keys are cached after it"
    assert cached["calibration"] == "not needed"
