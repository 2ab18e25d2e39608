"""Stress that a model cannot be given is refused, and why."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from laboratory.stress import Outliers, Stress, stressed
from tests.kvq_models.checkpoints import YARN, random_llama, tiny_config

BAD = {
    "nothing to do": (Stress(), "nothing to do"),
    "no channels": (Stress(value_outliers=Outliers(0, 4)), "between 1 and 16"),
    "too many pairs": (Stress(Outliers(9, 4)), "between 1 and 8"),
    "factor of zero": (Stress(Outliers(2, 0)), "factor above 0"),
    "negative bias": (Stress(key_bias=-1), "at least 0"),
    "infinite bias": (Stress(key_bias=float("inf")), "at least 0"),
    "bias beyond float32": (Stress(key_bias=1e300), r"at most 3.4e\+38"),
    "factor beyond float32": (Stress(Outliers(2, 1e40)), r"from 1.2e-38 to 8.5e\+37"),
    "factor whose inverse is none": (Stress(value_outliers=Outliers(2, 1e-41)), "from 1.2e-38"),
    "no input channels": (
        Stress(input_outliers=Outliers(0, 4)),
        "channels of a layer's input: between 1 and",
    ),
    "one dimension of nothing": (
        Stress(value_outliers=Outliers(2, 12), one_dimension=True),
        "one dimension of which pairs?",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused(case):
    stress, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        stressed(random_llama(tiny_config(num_hidden_layers=1)), stress)


@pytest.mark.parametrize("stress", [Stress(value_outliers=Outliers(2, 1e7)), Stress(key_bias=1e5)])
def test_weights_that_overflow_the_models_dtype_are_refused(stress):
    with pytest.raises(ValueError, match="is not finite in float16 after the change"):
        stressed(random_llama(tiny_config(num_hidden_layers=1), dtype=jnp.float16), stress)


def test_a_key_bias_is_refused_where_keys_are_normalized_or_wider_heads_would_turn_otherwise():
    for config, message in (
        (tiny_config("qwen3"), "QK-norm"),
        (
            tiny_config(head_dim=16, rope_scaling=YARN | {"original_max_position_embeddings": 32}),
            "'yarn' depend on the head's width",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            stressed(random_llama(config), Stress(key_bias=1.0))


def test_pairs_are_not_turned_where_a_norm_weighs_their_channels():
    with pytest.raises(ValueError, match="no pair can be turned"):
        stressed(
            random_llama(tiny_config("qwen3")),
            Stress(key_outliers=Outliers(2, 12.0), one_dimension=True),
        )
