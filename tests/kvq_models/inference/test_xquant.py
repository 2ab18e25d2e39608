"""XQuant on whole models: keys and values rebuilt from layer inputs equal the model's, for every
family and form, and the accumulator flows through the layers of prompts, steps and ragged
batches."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import decode_step, forward, prepare, score
from kvq_models.llama.model import layer_forward
from kvq_models.llama.rope import ropes_for
from tests.exhaustive import some
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config

MODELS = {
    "mha": {"num_key_value_heads": 4},
    "gqa4": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
    "bias": {"model_type": "qwen2", "num_attention_heads": 8},
    "qk_norm": {"model_type": "qwen3", "attention_bias": True},
    "narrow": {
        "num_key_value_heads": 4,
        "head_dim": 24,
    },  # keys wider than the model: latents of D channels
}
EXACT = {
    "x": "xquant:bits=16,latent=false",
    "latent": "xquant:bits=16,latent=true",
    "cross_x": "xquant_cl:bits=16,base_bits=16,early_bits=16,base_layer=1,latent=false",
    "cross_latent": "xquant_cl:bits=16,base_bits=16,early_bits=16,base_layer=1,latent=true",
    "cross_unit_x": (
        "xquant_cl:bits=16,base_bits=16,early_bits=16,base_layer=0,latent=false,reading=unit_norm"
    ),
    "cross_unit_latent": (
        "xquant_cl:bits=16,base_bits=16,early_bits=16,base_layer=0,latent=true,reading=unit_norm"
    ),
    "cross_residual": (
        "xquant_cl:bits=16,base_bits=16,early_bits=16,base_layer=0,reading=residual_stream"
    ),
}
USUAL = [("gqa4", form) for form in ("latent", "cross_x", "cross_residual")]
USUAL += [
    ("mha", "x"),
    ("bias", "cross_unit_x"),
    ("qk_norm", "cross_latent"),
    ("narrow", "latent"),
    ("narrow", "cross_unit_latent"),
]
LENGTH, CAPACITY = 40, 48
step = jax.jit(decode_step, donate_argnames="cache")


@functools.cache
def model(name: str):
    return random_llama(tiny_config(**{"num_hidden_layers": 3, **MODELS[name]}))


@functools.cache
def exact_inputs(name: str) -> tuple[kvq.types.LayerInputs, ...]:
    """Return the attention inputs of every layer of the exact model for two rows of tokens."""
    llama = model(name)
    tokens = random_tokens((2, LENGTH))
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), tokens.shape)
    valid, rope = jnp.ones(tokens.shape, bool), ropes_for(llama.config, LENGTH)
    hidden, found = llama.embed_tokens(tokens), []
    for layer in llama.layers:
        found.append(layer.attention_inputs(hidden, positions, valid, rope))
        hidden = layer_forward(layer, hidden, positions, valid, rope)
    return tuple(found)


@pytest.mark.parametrize(("name", "form"), some(itertools.product(MODELS, EXACT), USUAL))
def test_without_quantization_keys_and_values_are_the_models_own(name: str, form: str):
    llama = prepare(model(name), EXACT[form])
    carry: Any = ()
    for i, (inputs, own) in enumerate(zip(exact_inputs(name), llama.cache_parameters, strict=True)):
        k, v, carry = kvq.cache.roundtrip_layer(EXACT[form], inputs, own, i, carry)
        for side, found, wanted in (("k", k, inputs.k_rot), ("v", v, inputs.v)):
            assert row_errors(found, wanted).max() < 1e-5, (
                f"layer {i}, {side}: {row_errors(found, wanted).max():.1e}"
            )
        assert row_errors(k, inputs.k_pre).max() > 1e-2, "keys before RoPE pass"
    other = kvq.cache.roundtrip_layer(
        EXACT[form].replace("bits=16", "bits=8"),
        exact_inputs(name)[0],
        llama.cache_parameters[0],
        0,
        (),
    )
    assert row_errors(other[1], exact_inputs(name)[0].v).max() > 1e-4, "8 bits pass for exact"


CROSS = "xquant_cl:bits=3,base_layer=1,sink=2,recent=3,block=8"


def test_the_accumulator_serves_ragged_batches():
    """Scores through the cache, 32 tokens a step, of rows beside themselves and in a ragged batch.
    tests/kvq_jax/methods/test_xquant_carry.py takes short steps."""
    llama = prepare(model("gqa4"), CROSS)
    tokens, lengths = random_tokens((2, LENGTH)), jnp.asarray([LENGTH, 27])

    def empty() -> kvq.cache.Cache:
        return kvq.init_cache(CROSS, llama.config, 2, CAPACITY, "float32")

    together, _ = score(llama, empty(), tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        twice = jnp.stack([tokens[row].at[length:].set(5)] * 2)
        alone, _ = score(llama, empty(), twice, jnp.asarray([length] * 2))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-4, err_msg=f"row {row}")
        assert np.abs(together[1 - row] - alone[0]).max() > 1e-2, "the other row's would pass"
    exact = jax.nn.log_softmax(forward(llama, tokens))[0, jnp.arange(LENGTH - 1), tokens[0, 1:]]
    assert np.abs(np.asarray(together[0, 1:] - exact)).max() > 1e-2, "3 bits leave no trace"


def test_prepared_models_share_their_weights_and_forget_other_methods():
    llama = model("mha")
    x, latent = prepare(llama, "xquant"), prepare(llama, "xquant:latent=true")
    kernel = llama.layers[0].k_proj.kernel[...]
    assert x.cache_parameters[0][0]["k"]["kernel"] is kernel, "the x form copied a weight"
    keys = latent.cache_parameters[0][0]["k"]
    assert keys["input_kernel"] is kernel, "the latent form copied a weight"
    assert keys["kernel"].shape == (64, 64)
    assert llama.cache_parameters == ()
    assert prepare(latent, "kivi").cache_parameters == ()
    skipped = prepare(llama, "xquant:skip_layers=1").cache_parameters
    assert skipped[1] == ((), ())
    assert skipped[0]
