"""subtract_bias=true on whole models restores methods that collapse under a key bias, and is
refused in one line if it is impossible."""

import functools

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import calibrate, forward, prefill, prepare
from laboratory.stress import Stress, stressed
from tests.exhaustive import some
from tests.kvq_models.checkpoints import random_llama, random_tokens, tiny_config

LENGTH = 64
# and how many times the error grows, at least
COLLAPSING = [("int4:block=8", 4), ("innerq:bits=4,sink=0,recent=0,block=8", 2)]
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
