"""The scales of an fp8 cache that a checkpoint brings are read, checked, and the cache's."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import reference
from kvq_models import load_llama, prefill, prepare
from kvq_models.llama.checkpoint import CheckpointError, save_llama
from kvq_models.llama.quantized.kv_scales import NAMES
from tests.kvq_models.checkpoints import random_tokens
from tests.kvq_models.llama.published_cases import publish
from tests.kvq_models.llama.saved_checkpoint import change_config

STATED = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SCHEME = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
SPEC, TOKENS = "fp8:block=8", 24
SCALES = {(0, "k"): 0.003, (0, "v"): 0.004, (1, "k"): 0.005, (1, "v"): 0.006}


def name_of(layer: int, side: str, form: str = NAMES[0]) -> str:
    return f"model.layers.{layer}.self_attn.{form.format(side=side)}"


def checkpoint(
    floats: pathlib.Path,
    directory: pathlib.Path,
    form: str = NAMES[0],
    scheme: Any = STATED,
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
) -> pathlib.Path:
    """Publish a checkpoint in floats whose layers bring SCALES."""

    def with_scales(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name_of(0, "k")]
        for (layer, side), scale in SCALES.items():
            tensors[name_of(layer, side, form)] = np.full(1, scale, np.float32)
        change(tensors)

    fields = SCHEME | {"kv_cache_scheme": scheme}
    publish(floats, directory, fields, lambda a: ({"weight": a}, a), with_scales)
    return directory


def rows_of(path: pathlib.Path, spec: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the keys and values of each layer, as a cache holds them after a prompt."""
    llama = prepare(load_llama(path, dtype="float32")[0], spec)
    cache = kvq.init_cache(spec, llama.config, 1, TOKENS, "float32")
    _, cache = prefill(llama, cache, random_tokens((1, TOKENS)))
    parameters = llama.cache_parameters or ((),) * len(cache.plans)
    layers = zip(cache.plans, parameters, cache.layers, strict=True)
    vectors = (reference.decode_vectors(*layer, cache.lengths, None) for layer in layers)
    return [tuple(map(np.asarray, sides)) for sides in vectors]


def coded(rows: np.ndarray, scale: float) -> np.ndarray:
    scaled = np.clip(rows / np.float32(scale), -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)


def test_an_fp8_cache_has_the_scales_of_its_checkpoint(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    """A prompt's attention is exact, so all layers see the same rows through every cache."""
    path = checkpoint(floats, tmp_path)
    exact, stored = rows_of(path, "dense"), rows_of(path, SPEC)
    for layer, (rows, read) in enumerate(zip(exact, stored, strict=True)):
        for side, one, other in zip("kv", rows, read, strict=True):
            scale, where = SCALES[layer, side], f"{side} of layer {layer}"
            np.testing.assert_allclose(other, coded(one, scale), rtol=1e-6, err_msg=where)
            assert np.abs(other - coded(one, scale * 1.3)).max() > 1e-3, "any scale passes"
            assert np.abs(one).max() > 448 * scale, "nothing saturates"
    layout = kvq.cache.layout(SPEC, load_llama(path)[0].config, 1, TOKENS)
    assert not [one for one in kvq.size.components(layout) if one.name == "stats" and one.bytes]
    own = rows_of(path, SPEC + ",scale=head")
    assert np.abs(own[0][0]).max() > 448 * SCALES[0, "k"], "the prompt's own scales"


@pytest.mark.parametrize(
    ("form", "scheme"),
    [(NAMES[1], "static"), (NAMES[2], STATED), (NAMES[3], STATED | {"strategy": "attn_head"})],
)
def test_scales_are_read_by_the_names_of_all_publishers(
    form: str, scheme: Any, floats: pathlib.Path, tmp_path: pathlib.Path
):
    llama, _ = load_llama(checkpoint(floats, tmp_path, form, scheme))
    of_side = "v" if form == "kv_scale" else "k"  # the last one written
    expected = (np.float32(SCALES[1, of_side]),) * llama.config.num_key_value_heads
    assert llama.config.kv_scales is not None
    assert llama.config.kv_scales[1][0] == expected


def test_scales_are_read_where_modelopt_states_them(floats: pathlib.Path, tmp_path: pathlib.Path):
    checkpoint(floats, tmp_path, NAMES[1])
    change_config(tmp_path, quantization_config=None)
    stated = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    llama, _ = load_llama(tmp_path)
    assert llama.config.kv_scales is not None
    assert llama.config.kv_scales[1][0][0] == np.float32(SCALES[1, "k"])


def test_each_kv_head_may_have_a_scale(floats: pathlib.Path, tmp_path: pathlib.Path):
    of_heads = {name_of(1, "v"): np.array([0.5, 0.25], np.float32).reshape(2, 1, 1)}
    llama, _ = load_llama(checkpoint(floats, tmp_path, change=lambda t: t.update(of_heads)))
    assert llama.config.kv_scales is not None
    assert llama.config.kv_scales[1][1] == (0.5, 0.25)
    parameters = prepare(llama, SPEC).cache_parameters
    np.testing.assert_array_equal(parameters[1][1]["scale"], [0.5, 0.25])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.array([np.nan], np.float32), "nan: a scale of the cache is finite and positive"),
        (np.zeros(1, np.float32), "0.0: a scale"),
        (np.array([-1], np.float32), "-1.0: a scale"),
        (np.ones(3, np.float32), r"shape \[3\]: a scale of the cache is a float for all heads"),
        (np.ones(1, np.int32), "is I32 of shape"),
    ],
)
def test_damaged_scales_are_refused_by_name(
    wrong: np.ndarray, message: str, floats: pathlib.Path, tmp_path: pathlib.Path
):
    path = checkpoint(floats, tmp_path, change=lambda t: t.update({name_of(1, "v"): wrong}))
    with pytest.raises(ValueError, match=message) as caught:
        load_llama(path)
    assert name_of(1, "v") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_scales_are_missed_by_fp8_alone(floats: pathlib.Path, tmp_path: pathlib.Path):
    path = checkpoint(floats, tmp_path, change=lambda t: t.pop(name_of(1, "v")))
    llama, _ = load_llama(path)
    prepare(llama, "turboquant:bits=3")
    for spec in (SPEC + ",scale=head", SPEC + ",rotate=true", "nvfp4"):
        prepare(llama, spec)
    with pytest.raises(ValueError, match="kv_cache_scheme promises them, and the files lack them"):
        prepare(llama, SPEC)


@pytest.mark.parametrize(
    "scheme", [None, STATED | {"type": "int"}, STATED | {"dynamic": True}, STATED | {"num_bits": 4}]
)
def test_other_schemes_leave_fp8_to_the_prompt(
    scheme: Any, floats: pathlib.Path, tmp_path: pathlib.Path
):
    llama, _ = load_llama(checkpoint(floats, tmp_path, scheme=scheme))
    assert not llama.config.brings_kv_scales
    assert prepare(llama, SPEC) is llama


def test_a_saved_model_has_no_scales(floats: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "published").mkdir()
    llama, _ = load_llama(checkpoint(floats, tmp_path / "published"))
    save_llama(llama, tmp_path / "saved")
    assert not load_llama(tmp_path / "saved")[0].config.brings_kv_scales


def test_generate_says_where_the_scales_come_from(
    run, run_json, floats: pathlib.Path, tmp_path: pathlib.Path
):
    request = ("generate", checkpoint(floats, tmp_path), "--prompt-ids", "1,2,3,4,5,6,7,8,9")
    few = ("--max-new-tokens", 2, "--dtype", "float32")
    assert run_json(*request, "--cache", SPEC, *few)["kv_scales"]
    _, out, err = run(*request, "--cache", SPEC, *few)
    assert "scales of keys and values from the checkpoint" in out + err
    _, out, err = run(*request, "--cache", SPEC + ",scale=head", *few)
    assert "from the checkpoint" not in out + err


def test_scales_are_read_for_heads_that_the_files_have(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    path = checkpoint(floats, tmp_path)
    change_config(path, num_key_value_heads=2**40, num_attention_heads=2**40, head_dim=16)
    with pytest.raises(CheckpointError, match="has shape"):
        load_llama(path)
