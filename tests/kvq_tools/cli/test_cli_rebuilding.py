"""`kvq memory` and `kvq doctor` on caches that rebuild keys and values: the roofline, memory beside
the cache, the layers."""

import json

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
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
        fields = {"model_type": "llama", "hidden_size": D, "num_attention_heads": HEADS}
        fields |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 4096}
        (tmp_path / "config.json").write_text(json.dumps(SIZES | fields | sizes))
        return tmp_path

    return write


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
    unread = here["flops_per_token"] - ridge * here["cache_bytes_per_token"]
    expected = ridge * here["weight_bytes"] / unread
    assert cache["roofline"]["hidden_tokens"] == pytest.approx(expected)
    assert cache["roofline"]["hidden_tokens"] > 1.9 * cache["roofline"]["paper_hidden_tokens"], (
        "values need not be rebuilt"
    )


def test_flops_are_those_of_the_compiled_attention():
    heads, kv_heads, tokens, head_dim = 8, 2, 256, 128
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = tiny_config(num_hidden_layers=1, hidden_size=512, **sizes)
    (plan,) = kvq.cache.layout("xquant:bits=2", config, 1, tokens, "float32").plans
    params = plan.from_weights(layer_weights(abstract_llama(config, "float32").layers[0]))
    frequencies = jax.ShapeDtypeStruct((head_dim // 2,), jnp.float32)
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    rope = describe(kvq.types.Rope, inverse_frequencies=frequencies, attention_factor=factor)
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def counted(codec, read, parameters, last):
        body = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)),
            codec.body(1, kv_heads, tokens),
        )
        rows = jax.ShapeDtypeStruct((1, kv_heads, heads // kv_heads, last), jnp.float32)
        lowered = jax.jit(lambda params, *arrays: read(params, (), *arrays)).lower(
            parameters, rows, body, positions, rope
        )
        return lowered.compile().cost_analysis()["flops"] / tokens

    keys = counted(plan.k, plan.k.scores, params[0], head_dim)
    values = counted(plan.v, plan.v.weighted, params[1], tokens)
    expected = memory_roofline.layer_cost(plan, config, 0).flops_per_token
    assert keys + values == pytest.approx(expected, rel=0.12), (
        "decoding, RoPE and the scores themselves are the rest"
    )
    assert values < 2 * plan.row_width * kv_heads * head_dim / 3, "values are not rebuilt"


def test_parameters_and_working_memory_are_those_of_a_prepared_model(tmp_path, run, run_json):
    config = tiny_config(
        num_attention_heads=8, num_key_value_heads=2, head_dim=8, num_hidden_layers=4
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    specs = ("xquant:bits=2", "xquant_cl:bits=2", "kivi:bits=2,group_size=8")
    command = f"memory {tmp_path} --context 512 {' '.join(f'--cache {spec}' for spec in specs)}"
    found = run_json(f"{command} --batch 3 --dtype float32")["caches"]
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
    out = run(command)[1]
    beside = ("beside the cache", "parameters", "working memory")
    for part in ("resident", "batch 1", "batch 16", *beside):
        assert part in out, part


def test_doctor_says_where_qk_norm_is_applied(tmp_path, run_json):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3").to_hf()))
    rebuilt, cached = (
        run_json("doctor", tmp_path, "--cache", spec)["facts"]
        for spec in ("xquant", "kivi:group_size=8")
    )
    assert rebuilt["qk_norm"] == "yes; applied when keys are rebuilt"
    assert cached["qk_norm"] == "yes; keys are cached after it"
    assert cached["calibration"] == "not needed"
