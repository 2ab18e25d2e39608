"""Quality is measured through the cache: the exact cache gives the model's numbers, and a worse
cache worse ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.llama.model import forward
from kvq_tools.evaluation import measure
from tests.kvq_models.checkpoints import random_llama, tiny_config

ROWS, LENGTH = 3, 75  # not a multiple of the step


@pytest.fixture(scope="module")
def scene():
    llama = random_llama(tiny_config(num_hidden_layers=2, head_dim=16))
    rows = jnp.asarray(
        np.random.default_rng(0).integers(0, llama.config.vocab_size, (ROWS, LENGTH)), jnp.int32
    )
    return llama, rows


def test_the_exact_cache_gives_the_models_own_numbers_after_a_prompt_that_is_not_scored(scene):
    llama, rows = scene
    found = measure(llama, "dense", rows, prompt=20)
    logprobs = jax.nn.log_softmax(forward(llama, rows))[:, 20:-1]
    nats = -jnp.take_along_axis(logprobs, rows[:, 21:, None], axis=-1)
    assert found.tokens == ROWS * (LENGTH - 21)
    assert found.nats == pytest.approx(float(jnp.mean(nats)), rel=1e-4)
    assert found.perplexity == pytest.approx(float(jnp.exp(jnp.mean(nats))), rel=1e-4)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.nats != pytest.approx(measure(llama, "dense", rows).nats, rel=1e-4)
    with pytest.raises(ValueError, match="leaves fewer than two of 75"):
        measure(llama, "dense", rows, prompt=74)
