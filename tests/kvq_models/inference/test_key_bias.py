"""subtract_bias=true on whole models restores methods that collapse under a key bias, and is
refused in one line if it is impossible."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import calibrate, forward, prefill, prepare, save_llama
from laboratory.stress import Stress, stressed
from tests.exhaustive import some
from tests.kvq_models.checkpoints import random_llama, random_tokens, tiny_config

LENGTH = 64
# and how many times the error grows, at least
COLLAPSING = [
    ("int4:block=8", 4),
    ("innerq:bits=4,sink=0,recent=0,block=8", 2),
]
EIGHT_BITS = ["int8:block=8,scale_dtype=float32", "int8:block=8,pre_rope=true,scale_dtype=float32"]
jitted_forward = jax.jit(forward)


@functools.cache
def stressed_qwen2(bias: float):
    """Return a Qwen2 of one layer whose dense outputs do not depend on `bias`."""
    config = tiny_config("qwen2", num_attention_heads=8, head_dim=16, num_hidden_layers=1)
    return stressed(random_llama(config), Stress(key_bias=bias))


def cache_error(llama, spec: str) -> float:
    """Mean |change of a logit| of the second half of a text, which reads the first half from the
    cache."""
    tokens, llama = random_tokens((2, LENGTH)), prepare(llama, spec)
    _, cache = prefill(
        llama, kvq.init_cache(spec, llama.config, 2, LENGTH, "float32"), tokens[:, : LENGTH // 2]
    )
    logits, _ = prefill(llama, cache, tokens[:, LENGTH // 2 :], logits="all")
    return float(
        np.abs(np.asarray(logits - jitted_forward(llama, tokens)[:, LENGTH // 2 :])).mean()
    )


@pytest.mark.parametrize(("spec", "collapse"), some(COLLAPSING, COLLAPSING[:1]))
def test_what_collapses_under_a_key_bias_is_restored(spec: str, collapse: float):
    plain, biased = cache_error(stressed_qwen2(0.0), spec), cache_error(stressed_qwen2(50.0), spec)
    restored = cache_error(stressed_qwen2(50.0), f"{spec},subtract_bias=true")
    assert biased > collapse * plain, f"{biased:.4f} with a bias, {plain:.4f} without: no collapse"
    assert restored < 1.2 * plain, f"{restored:.4f} with the option, {plain:.4f} without a bias"


@pytest.mark.parametrize("spec", some(EIGHT_BITS, EIGHT_BITS[1:]))
def test_eight_bits_give_the_same_logits_with_and_without_the_option(spec: str):
    llama = stressed_qwen2(0.0)  # which has the biases of its family
    without, with_option = (
        cache_error(llama, f"{spec}{option}") for option in ("", ",subtract_bias=true")
    )
    assert with_option < 1.5 * without < 0.02, f"{without:.5f} without, {with_option:.5f} with"
    broken = prepare(llama, f"{spec},subtract_bias=true")
    k, v = broken.cache_parameters[0]
    broken.cache_parameters = (({"bias": k["bias"] * 0.9}, v),)
    tokens, cache = (
        random_tokens((2, LENGTH)),
        kvq.init_cache(f"{spec},subtract_bias=true", llama.config, 2, LENGTH, "float32"),
    )
    _, cache = prefill(broken, cache, tokens[:, : LENGTH // 2])
    broken.cache_parameters = (({"bias": k["bias"]}, v),)
    logits, _ = prefill(broken, cache, tokens[:, LENGTH // 2 :], logits="all")
    error = np.abs(np.asarray(logits - jitted_forward(llama, tokens)[:, LENGTH // 2 :])).mean()
    assert error > 3 * with_option, "a cache that was filled with another bias passes"


def test_parameters_are_the_models_own_biases():
    llama = stressed_qwen2(50.0)
    prepared = prepare(llama, "int4:subtract_bias=true")
    ((k, v),) = prepared.cache_parameters
    assert k["bias"] is llama.layers[0].k_proj.bias.get_value(), "the bias was copied"
    assert v == ()
    assert prepare(prepared, "int4").cache_parameters == ()
    assert prepare(llama, "int4:subtract_bias=true,skip_layers=0").cache_parameters == ()


def test_calibration_sees_keys_without_their_bias(tmp_path):
    """Levels and ranges of a model with a large bias equal the model without it, and its keys are
    coded as well as there."""
    tokens = np.asarray(random_tokens((1, 400)))[0]
    spec = "kvquant:bits=3,outliers=0,sink=0,block=8"
    found = {}
    for bias in (0.0, 50.0):
        for option in ("", ",subtract_bias=true"):
            made = calibrate(
                stressed_qwen2(bias),
                tokens,
                spec + option,
                samples=2,
                length=LENGTH,
                work=tmp_path / str(bias),
            )
            found[bias, option] = made
    names = [name for name in found[0.0, ""].tensors if name.startswith("layers.0.k")]
    same, apart = (
        max(
            np.abs(found[50.0, option].tensors[name] - found[0.0, option].tensors[name]).max()
            for name in names
        )
        for option in (",subtract_bias=true", "")
    )
    assert same < 1e-2 < 10 < apart, (
        f"parameters move by {same:.1e} with the option, by {apart:.1e} without"
    )
    with pytest.raises(ValueError, match=r"\A[^\n]+ was calibrated for other options[^\n]+\Z"):
        prepare(stressed_qwen2(50.0), f"{spec},subtract_bias=true", found[50.0, ""])
    ((k, v),) = prepare(
        stressed_qwen2(50.0), f"{spec},subtract_bias=true", found[50.0, ",subtract_bias=true"]
    ).cache_parameters
    assert set(k) == {"bias", *(name.removeprefix("layers.0.k.") for name in names)}
    assert "bias" not in v


# --- what cannot be had

REFUSED = {
    "no bias": (tiny_config(), "int4:subtract_bias=true", "no bias; leave the option out"),
    "QK-norm": (tiny_config("qwen3", attention_bias=True), "int4:subtract_bias=true", "QK-norm"),
    "exact keys": (
        tiny_config("qwen2"),
        "dense:subtract_bias=true",
        "keeps keys in full precision",
    ),
    "rebuilt keys": (tiny_config("qwen2"), "xquant:subtract_bias=true", "caches no keys"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_or_method_without_a_known_constant_is_refused_in_one_line(
    case: str, tmp_path, run
):
    config, spec, message = REFUSED[case]
    llama = random_llama(config)
    with pytest.raises(ValueError, match=r"\A[^\n]*subtract_bias=true[^\n]*\Z") as error:
        prepare(llama, spec)
    assert message in str(error.value)
    save_llama(llama, tmp_path)
    code, out, err = run("doctor", tmp_path, "--cache", spec)
    assert (code, out) == (2, "")
    assert err.strip().splitlines()[-1] == f"kvq: error: {error.value}"


def test_doctor_suggests_the_option_and_tells_what_it_does(tmp_path, run, run_json):
    save_llama(stressed_qwen2(50.0), tmp_path)
    for spec in (
        "int4",
        "innerq:sink=0,recent=8,block=8",
        "nf4",
        "kvquant:k_axis=token,outliers=0,block=8",
    ):
        (warning,) = (
            w
            for w in run_json("doctor", tmp_path, "--cache", spec)["warnings"]
            if "k_proj bias" in w
        )
        assert "add subtract_bias=true" in warning, spec
    found = run_json("doctor", tmp_path, "--cache", "int4:subtract_bias=true")
    assert not found["warnings"] or all("k_proj bias" not in w for w in found["warnings"])
    assert found["facts"]["k_proj_bias"].endswith("; subtracted before keys are quantized")
    layer = found["layers"][0]
    assert (layer["k"]["codec"], layer["k"]["subtract_bias"], "subtract_bias" in layer["v"]) == (
        "GroupedCodec",
        True,
        False,
    )
    assert layer["k"]["packing"] == layer["v"]["packing"]
    assert "subtract_bias=true adds" in layer["no_kernel"]
    _, text, _ = run("doctor", tmp_path, "--cache", "int4:subtract_bias=true")
    assert "subtract_bias" in text
