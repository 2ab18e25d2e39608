"""What a model multiplies in bfloat16 is what it multiplies in float32, rounded once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from kvq_models.llama.activations import activated, clipped_swiglu
from tests.kvq_models.checkpoints import random_llama, tiny_config

ROWS = np.random.default_rng(0).normal(0, 2, (2, 1000))


@pytest.mark.parametrize(
    "function",
    [
        lambda gate, up: activated("silu", gate),
        lambda gate, up: activated("gelu_tanh", gate),
        lambda gate, up: clipped_swiglu(gate, up, 7.0, 1.702),
    ],
    ids=["silu", "gelu", "gpt-oss"],
)
def test_activations_of_bfloat16_are_those_of_float32(function: Callable[..., Array]):
    gate, up = jnp.asarray(ROWS, jnp.bfloat16)
    exact = function(gate.astype(jnp.float32), up.astype(jnp.float32))
    for compiled in (function, jax.jit(function)):
        rounded = compiled(gate, up)
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


def test_gelu_in_bfloat16_would_not_be():
    gate = jnp.asarray(ROWS[0], jnp.bfloat16)
    assert (jax.nn.gelu(gate) != activated("gelu_tanh", gate)).mean() > 0.1


@pytest.mark.parametrize("multiplier", [168**-0.5, 144**-0.5])
def test_a_factor_of_scores_keeps_its_bits_in_bfloat16(multiplier: float):
    """The factors of Gemma 3 27B and Gemma 2 27B. A rounded factor moves all scores the same way,
    so no number of tokens averages it out."""
    plain = tiny_config("llama", head_dim=128)
    scaled = dataclasses.replace(plain, attention_multiplier=multiplier)
    factor = multiplier * 128**0.5
    assert abs(float(jnp.bfloat16(factor)) / factor - 1) > 1e-3, "bfloat16 holds the factor"
    rows = jnp.asarray(ROWS[:, : plain.num_attention_heads * 128], jnp.bfloat16)[None]
    queries, products = (
        np.asarray(random_llama(config).layers[0]._query_heads(rows), np.float64)
        for config in (plain, scaled)
    )
    assert np.median(products / queries) == pytest.approx(factor, rel=3e-4)
