"""Tokens and caches that do not fit are refused before any work."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import decode_step, generate, prefill, prepare, score
from tests.kvq_models.checkpoints import random_llama, tiny_config

CAPACITY = 96


@functools.cache
def model():
    return random_llama(tiny_config())


def new_cache(spec):
    return kvq.init_cache(spec, model().config, 2, CAPACITY, "float32")


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (np.zeros((2, CAPACITY + 1), int), None, "row 0 needs 9[78] tokens .* capacity is 96"),
        (
            np.full((2, 4), 96),
            None,
            "token id 96 at row 0, position 0 is outside the vocabulary of 96",
        ),
        (np.full((2, 4), -1), None, "token id -1"),
        (np.zeros((3, 4), int), None, r"tokens must be \[batch, length\] with batch 2"),
        (np.zeros((4,), int), None, "got shape"),
        (np.zeros((2, 4), int), [5, 1], "lengths must be between 0 and 4"),
        (np.zeros((2, 4), int), [4], "lengths must be"),
    ],
)
def test_bad_tokens_are_refused_in_one_line(tokens, lengths, message):
    cache = new_cache("kivi")
    for call in (prefill, functools.partial(generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match=message) as refused:
            call(model(), cache, tokens, lengths)
        assert "\n" not in str(refused.value)
        assert cache.lengths.tolist() == [0, 0], "the cache's buffers were consumed"


@pytest.mark.parametrize(
    "fields",
    [{"num_attention_heads": 8, "head_dim": 16}, {"num_key_value_heads": 4}, {"head_dim": 32}],
)
def test_a_cache_of_other_heads_is_refused_by_field(fields):
    config, (name, value) = tiny_config(**fields), next(iter(fields.items()))
    other = kvq.init_cache("dense", config, 1, 32, "float32")
    message = (
        f"^the cache was made for another model: it has {name}={value} and not"
        f" {getattr(model().config, name)}"
    )
    for step in (lambda: prefill(model(), other, [[1]]), lambda: score(model(), other, [[1]])):
        with pytest.raises(ValueError, match=message):
            step()
    with pytest.raises(ValueError, match=message):
        jax.jit(decode_step)(model(), other, jnp.asarray([1]))


def test_prepare_is_the_identity_for_methods_without_parameters_and_refuses_a_calibration():
    assert prepare(model(), "kivi") is model()
    with pytest.raises(ValueError, match="takes no calibration"):
        prepare(model(), "kivi", calibration="file.safetensors")
    with pytest.raises(ValueError, match="divisors"):
        prepare(model(), "kivi:group_size=24,block=24")
