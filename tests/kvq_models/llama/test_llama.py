"""The model as a pytree under plain jax transforms, and the laws of its forward pass. No torch
needed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.llama import hf_names
from kvq_models.llama.model import Llama, abstract_llama, forward
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config


def numpy_weights(llama: Llama) -> dict[str, np.ndarray]:
    return {path: np.asarray(weight.leaf) for path, weight in hf_names.weights(llama).items()}


def test_plain_jit_traces_once_for_models_of_one_config_and_leaves_weights_alive():
    traces = 0

    def step(llama, tokens, buffer):
        nonlocal traces
        traces += 1
        return forward(llama, tokens), buffer + 1.0

    jitted = jax.jit(step, donate_argnames="buffer")
    tokens = random_tokens((2, 8))
    models = [random_llama(tiny_config(), seed=seed) for seed in (0, 1)]
    outputs = [jitted(llama, tokens, jnp.zeros(3))[0] for llama in models]
    again = jitted(models[0], tokens, jnp.zeros(3))[0]
    assert traces == 1
    np.testing.assert_array_equal(outputs[0], again)
    assert row_errors(outputs[1], outputs[0]).min() > 0.1, "another model gives the same logits"


def test_another_config_is_another_trace():
    jitted = jax.jit(forward)
    tokens = random_tokens((1, 8))
    config = tiny_config()
    llama = random_llama(config)
    stretched = dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=1e6))
    same_weights = hf_names.replace_weights(
        abstract_llama(stretched), {p: w.leaf for p, w in hf_names.weights(llama).items()}
    )
    assert row_errors(jitted(same_weights, tokens), jitted(llama, tokens)).max() > 1e-3, (
        "a stale compiled function answered"
    )


def test_cache_parameters_are_data_of_a_copy_and_not_weights():
    llama = random_llama(tiny_config())
    prepared = jax.tree.map(lambda leaf: leaf, llama)
    prepared.cache_parameters = (jnp.ones(2), {"codebook": jnp.arange(3.0)})
    assert llama.cache_parameters == ()
    total = jax.jit(lambda model: model.cache_parameters[1]["codebook"].sum())(prepared)
    assert float(total) == 3.0
    assert hf_names.weights(prepared).keys() == hf_names.weights(llama).keys()
    assert prepared.embed[...] is llama.embed[...], "the copy holds its own weights"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_reach_every_weight_in_its_dtype_with_and_without_remat(dtype):
    llama = random_llama(
        tiny_config("qwen3", attention_bias=True, num_hidden_layers=1), dtype=jnp.dtype(dtype)
    )
    tokens = random_tokens((2, 12))

    def loss(llama, remat):
        return -jax.nn.log_softmax(forward(llama, tokens, remat=remat))[..., 0].mean()

    gradient = jax.jit(jax.grad(loss), static_argnames="remat")
    plain = numpy_weights(gradient(llama, remat=False))
    remat = numpy_weights(gradient(llama, remat=True)) if dtype == "float32" else plain
    for path, leaf in plain.items():
        assert leaf.dtype == dtype, path
        assert np.isfinite(leaf.astype(np.float32)).all(), path
        assert np.abs(leaf.astype(np.float32)).max() > 0, f"no gradient reaches {path}"
        both = (one.astype(np.float32) for one in (remat[path], leaf))
        np.testing.assert_allclose(*both, rtol=1e-3, atol=1e-6, err_msg=path)


def test_bfloat16_logits_are_float32_and_near_the_float32_model():
    tokens = random_tokens((2, 24))
    jitted = jax.jit(forward)
    exact = jitted(random_llama(tiny_config()), tokens)
    rounded = jitted(random_llama(tiny_config(), dtype=jnp.bfloat16), tokens)
    assert rounded.dtype == jnp.float32
    errors = row_errors(rounded, exact)
    assert errors.max() < 0.05, (
        f"{errors.max():.3f} at (row, token) {np.unravel_index(errors.argmax(), errors.shape)}"
    )


def test_unknown_token_ids_give_nan_not_another_tokens_row():
    llama = random_llama(tiny_config())
    vocabulary = llama.config.vocab_size
    tokens = jnp.asarray([[0, 3, vocabulary - 1, vocabulary, -1, -vocabulary, -2_000_000_000]])
    hidden = np.asarray(jax.jit(lambda llama, tokens: llama.embed_tokens(tokens))(llama, tokens))[0]
    assert (hidden[:3] == np.asarray(llama.embed[...])[[0, 3, -1]]).all()
    assert np.isnan(hidden[3:]).all(), np.isnan(hidden).all(-1)
