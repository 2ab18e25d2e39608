"""Calibrations as files and in prepared models: nothing that is not one for this model and cache is
used as one."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvq_jax as kvq
from kvq_jax.files.checksum import save_tensors
from kvq_models import load_calibration, prefill, prepare, resolved, save_calibration, save_llama
from kvq_models.calibration.fingerprint import partial_fingerprint, partial_fingerprint_of
from kvq_models.calibration.needs import needs
from kvq_models.llama import hf_names
from kvq_models.llama.checkpoint import open_checkpoint
from kvq_models.llama.rope_config import RopeConfig
from tests.kvq_models.calibration_runs import KEYS_ONLY, SPEC, one_line, run
from tests.kvq_models.checkpoints import (
    CASES,
    model,
    random_llama,
    random_tokens,
    row_errors,
    tiny_config,
)

# --- the file


def test_a_file_gives_back_the_calibration_bit_for_bit(work, file):
    made, read = run(work), load_calibration(file, model(), SPEC)
    assert dataclasses.replace(read, tensors={}) == dataclasses.replace(made, tensors={})
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        np.testing.assert_array_equal(read.tensors[name], tensor, err_msg=name, strict=True)


@pytest.mark.parametrize(
    "spec",
    [
        f"{SPEC},skip_layers=1",
        f"{SPEC},sink=4,recent=32",
        f"{SPEC},qnorm=true",
        f"k={SPEC.removesuffix(',block=8')}+v=kivi:bits=2",
    ],
)
def test_a_file_serves_caches_that_differ_in_windows_skipped_layers_or_the_other_side(spec, file):
    read = load_calibration(file, model(), spec)
    assert read.keys.keys() == needs(kvq.parse(spec), model().config).keys()
    prepare(model(), spec, read)


def test_a_calibration_decides_what_its_spec_leaves_open_and_serves_every_budget(work, tmp_path):
    spec = "waterfill:bits=2,sink=1,recent=3,block=16"
    made = run(work, spec)
    assert made.spec == str(resolved(spec, made)) != spec
    assert kvq.size.body_bits_per_element(made.spec, made.dims) == kvq.size.body_bits_per_element(
        spec, made.dims
    )
    path = tmp_path / "waterfill.safetensors"
    save_calibration(made, path)
    for asked in (
        "waterfill:bits=3,block=16",
        "k=dense+v=waterfill:bits=2,v_widths=4100",
        made.spec,
        f"{spec},skip_layers=0",
    ):
        read = load_calibration(path, model(), asked)
        used = resolved(asked, read)
        assert resolved(used, read) == used
        prepare(model(), used, read)
    assert resolved(SPEC, run(work)) == kvq.parse(SPEC), (
        "a method without open options stays as it is"
    )


def changed(path, change):
    """Change a file's tensors and header, and give it the right checksum for them."""
    tensors = load_file(path)
    with path.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))["__metadata__"]
    change(tensors, header)
    save_tensors(path, tensors, header)


BROKEN = {
    "missing tensor": (
        lambda t, h: t.pop("layers.1.v.levels"),
        "tensor layers.1.v.levels is missing",
    ),
    "unknown tensor": (
        lambda t, h: t.update({"layers.0.k.more": np.ones(2)}),
        "tensor layers.0.k.more is unknown",
    ),
    "odd name": (lambda t, h: t.update({"levels": np.ones(4)}), "tensor levels is unknown"),
    "other shape": (
        lambda t, h: t.update({"layers.0.k.levels": np.ones(5, np.float32)}),
        "is float32[5], expected float32[4]",
    ),
    "not finite": (
        lambda t, h: t["layers.1.k.scale"].__setitem__((0, 3), np.inf),
        "tensor layers.1.k.scale is not finite",
    ),
    "no calibration": (lambda t, h: h.clear() or h.update(format="pt"), "is not a calibration"),
    "no samples": (lambda t, h: h.pop("samples"), "header field samples=None"),
    "odd dims": (lambda t, h: h.update(dims="[]"), "header field dims="),
    "deep dims": (lambda t, h: h.update(dims="[" * 100_000), "header field dims="),
    "other dims": (
        lambda t, h: h.update(dims=h["dims"].replace('"head_dim": 16', '"head_dim": 32')),
        "another model: head_dim 32, and this model has 16",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_name(case, file):
    change, message = BROKEN[case]
    changed(file, lambda *_: None)
    load_calibration(file, model(), SPEC)
    changed(file, change)
    one_line(message, load_calibration, file, model(), SPEC)


def test_another_model_or_other_options_are_refused_by_name(file):
    one_line(
        "another model of the same size",
        load_calibration,
        file,
        random_llama(tiny_config(), seed=1),
        SPEC,
    )
    one_line(
        "num_hidden_layers 2, and this model has 3",
        load_calibration,
        file,
        model(num_hidden_layers=3),
        SPEC,
    )
    for option, other in (
        ("bits=2", "bits=3"),
        ("outliers=0.1", "outliers=0.2"),
        ("bits=2", "bits=2,pre_rope=false"),
    ):
        one_line(
            "other options: layers.0.k for 'kvquant:bits=2",
            load_calibration,
            file,
            model(),
            SPEC.replace(option, other),
        )
    one_line("takes no calibration", load_calibration, file, model(), "kivi")


FAMILIES = {
    "qwen3": {"attention_bias": True, "head_dim": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "qwen3_moe": CASES["qwen3_moe"].fields,
    "gpt_oss": CASES["gpt_oss"].fields,
    "granitemoehybrid": CASES["granite_4"].fields,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fingerprint_depends_on_every_weight_and_not_on_the_dtype(family):
    llama = random_llama(tiny_config(family, **FAMILIES[family]))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llama)
    expected = partial_fingerprint(llama)
    assert partial_fingerprint(rounded) == expected
    for path, weight in hf_names.weights(llama).items():
        other = weight.leaf.at[(0,) * weight.leaf.ndim].add(1.0)
        assert partial_fingerprint(hf_names.replace_weights(llama, {path: other})) != expected, path


SETTINGS = {
    "sliding_window": 8,
    "windowed_layers": (1,),
    "rms_norm_eps": 1e-2,
    "activation": "gelu_tanh",
    "unit_offset_norms": True,
    "unrotated_layers": (0,),
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_soft_cap": 5.0,
    "logits_soft_cap": 5.0,
    "attention_sinks": True,
    "rope": RopeConfig(rope_type="linear", factor=2.0),
    "local_rope": RopeConfig(theta=1e3),
}


def test_a_fingerprint_depends_on_what_a_layer_computes():
    config = tiny_config()
    expected = partial_fingerprint(random_llama(config))
    for name, value in SETTINGS.items():
        other = random_llama(dataclasses.replace(config, **{name: value}))
        assert partial_fingerprint(other) != expected, name
    for fields in ({"max_position_embeddings": 128}, {"eos_token_ids": (5,)}):
        same = random_llama(dataclasses.replace(config, **fields))
        assert partial_fingerprint(same) == expected, fields


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_has_the_fingerprint_of_its_model(family, tmp_path):
    llama = random_llama(tiny_config(family, **FAMILIES[family]))
    save_llama(llama, tmp_path / "model")
    assert partial_fingerprint_of(open_checkpoint(tmp_path / "model")) == partial_fingerprint(llama)


def test_files_whose_fingerprint_was_of_few_weights_are_refused(file):
    changed(file, lambda tensors, header: header.update(format_version="2"))
    one_line(
        "this version of kvq reads '3': calibrate again", load_calibration, file, model(), SPEC
    )


# --- a prepared model


def test_a_prepared_model_decodes_with_what_was_calibrated_from_memory_and_from_file(work, file):
    llama, calibration = model(), run(work)
    tokens = random_tokens((1, 40), seed=3)

    def logits(prepared):
        cache = kvq.init_cache(SPEC, llama.config, 1, 64, "float32")
        _, cache = prefill(prepared, cache, tokens)
        return np.asarray(prefill(prepared, cache, tokens[:, :8])[0])

    found = logits(prepare(llama, SPEC, calibration))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(logits(prepare(llama, SPEC, file)), found)
    doubled = {
        name: tensor * (2 if name.endswith("scale") else 1)
        for name, tensor in calibration.tensors.items()
    }
    other = logits(prepare(llama, SPEC, dataclasses.replace(calibration, tensors=doubled)))
    assert row_errors(other, found).min() > 1e-3, "the parameters are not used"
    assert llama.cache_parameters == (), "the given model was changed"


def test_parameters_stand_in_the_order_of_layers_and_sides(work):
    calibration = run(work, KEYS_ONLY)
    (k0, v0), (k1, v1) = prepare(model(), KEYS_ONLY, calibration).cache_parameters
    assert (v0, v1) == ((), ())
    np.testing.assert_array_equal(k0["scale"], calibration.tensors["layers.0.k.scale"])
    np.testing.assert_array_equal(k1["scale"], calibration.tensors["layers.1.k.scale"])
    skipped = f"{SPEC},skip_layers=0"
    assert prepare(model(), skipped, run(work, skipped)).cache_parameters[0] == ((), ())
