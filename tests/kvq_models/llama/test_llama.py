"""The model as a pytree under plain jax transforms, and the laws of its forward pass. No torch
needed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.llama import hf_names
from kvq_models.llama.model import Layer, Llama, abstract_llama, causal_attention, forward
from kvq_models.llama.rope import ropes_for
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config

QWEN3 = tiny_config("qwen3", attention_bias=True)


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
        np.testing.assert_allclose(
            remat[path].astype(np.float32),
            leaf.astype(np.float32),
            rtol=1e-3,
            atol=1e-6,
            err_msg=path,
        )


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


def test_right_padding_does_not_change_the_logits_of_real_tokens():
    llama = random_llama(tiny_config())
    tokens = random_tokens((3, 20))
    lengths = jnp.asarray([20, 7, 0])
    valid = jnp.arange(20)[None] < lengths[:, None]
    padded = jax.jit(forward)(llama, jnp.where(valid, tokens, 5), valid)
    assert np.isfinite(padded).all(), "an empty row is not finite"
    alone = jax.jit(forward)(llama, tokens[1:2, :7])
    assert row_errors(padded[1, :7], alone[0]).max() < 1e-5


def test_later_tokens_do_not_change_earlier_logits():
    llama, jitted = random_llama(tiny_config()), jax.jit(forward)
    tokens = random_tokens((1, 16))
    changed = tokens.at[0, 10].add(1)
    errors = row_errors(*(jitted(llama, one) for one in (changed, tokens)))[0]
    assert errors[:10].max() < 1e-6
    assert errors[10:].min() > 1e-4, "the changed token is not seen"


def test_unknown_token_ids_give_nan_not_another_tokens_row():
    llama = random_llama(tiny_config())
    vocabulary = llama.config.vocab_size
    tokens = jnp.asarray([[0, 3, vocabulary - 1, vocabulary, -1, -vocabulary, -2_000_000_000]])
    hidden = np.asarray(jax.jit(lambda llama, tokens: llama.embed_tokens(tokens))(llama, tokens))[0]
    assert (hidden[:3] == np.asarray(llama.embed[...])[[0, 3, -1]]).all()
    assert np.isnan(hidden[3:]).all(), np.isnan(hidden).all(-1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1)])
def test_causal_attention_reads_kv_head_n_over_g_for_query_head_n(heads, kv_heads):
    length, head_dim = 9, 8
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal((2, count, length, head_dim), np.float32)
        for count in (heads, kv_heads, kv_heads)
    )
    got = np.asarray(jax.jit(causal_attention)(q, k, v, np.ones((2, length), bool)))
    mask = np.tril(np.ones((length, length), bool))
    for n in range(heads):
        scores = np.where(
            mask,
            np.einsum("bth,bsh->bts", q[:, n], k[:, n * kv_heads // heads]) / np.sqrt(head_dim),
            -np.inf,
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = (weights / weights.sum(-1, keepdims=True)) @ v[:, n * kv_heads // heads]
        np.testing.assert_allclose(got[:, n], want, rtol=1e-4, atol=1e-5, err_msg=f"query head {n}")


def test_layer_inputs_rebuild_keys_and_values_from_x():
    """Methods that cache x or pre-RoPE keys rely on this: x alone gives back every row that
    attention reads."""
    llama = random_llama(QWEN3)
    layer: Layer = llama.layers[0]
    rope = ropes_for(llama.config, capacity=8)
    positions = jnp.asarray([[0, 1, 2], [4, 5, 6]])
    inputs = jax.jit(Layer.attention_inputs)(
        layer, llama.embed_tokens(random_tokens((2, 3))), positions, jnp.ones((2, 3), bool), rope
    )
    shapes = {
        name: getattr(inputs, name).shape for name in ("x", "q_pre", "q_rot", "k_pre", "k_rot", "v")
    }
    assert shapes == {
        "x": (2, 3, 64),
        "q_pre": (2, 4, 3, 16),
        "q_rot": (2, 4, 3, 16),
        **dict.fromkeys(("k_pre", "k_rot", "v"), (2, 2, 3, 16)),
    }
    np.testing.assert_allclose(layer.keys(inputs.x), inputs.k_pre, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.values(inputs.x), inputs.v, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.linalg.norm(inputs.k_rot, axis=-1), np.linalg.norm(inputs.k_pre, axis=-1), rtol=1e-5
    )
    assert not np.allclose(inputs.k_rot[:, :, 1:], inputs.k_pre[:, :, 1:]), "keys were not rotated"


def test_abstract_model_has_the_tree_and_shapes_of_the_real_one():
    abstract, real = abstract_llama(QWEN3, jnp.bfloat16), random_llama(QWEN3, dtype=jnp.bfloat16)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(abstract)] == [
        (r.shape, r.dtype) for r in jax.tree.leaves(real)
    ]
