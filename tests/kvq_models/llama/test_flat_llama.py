"""A model as one list of arrays: what it holds, and that programs know it again."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvq_jax.cache.cache import init_cache
from kvq_models import decode_step
from kvq_models.llama.flat_llama import FlatLlama
from tests.kvq_models.checkpoints import random_llama, tiny_config


def test_the_module_comes_back_with_the_same_arrays():
    llama = random_llama(tiny_config())
    arrays, again = jax.tree.leaves(llama), FlatLlama(llama).llama()
    assert all(a is b for a, b in zip(arrays, jax.tree.leaves(again), strict=True))
    assert again.config == llama.config


def test_a_program_is_traced_once_for_models_of_one_structure():
    traced = []

    @jax.jit
    def head(model: FlatLlama, hidden: jax.Array) -> jax.Array:
        traced.append(model)
        return model.llama().logits(hidden)

    config = tiny_config()
    hidden = jnp.ones((1, 1, config.hidden_size))
    one, other = (random_llama(config, seed=seed) for seed in (1, 2))
    first, second = head(FlatLlama(one), hidden), head(FlatLlama(other), hidden)
    assert len(traced) == 1
    np.testing.assert_array_equal(first, jax.jit(lambda llama: llama.logits(hidden))(one))
    assert not np.array_equal(first, second), "the second model's arrays were not taken"
    head(FlatLlama(random_llama(tiny_config(num_hidden_layers=1))), hidden)
    assert len(traced) == 2


def test_later_changes_of_the_module_are_not_seen():
    llama = random_llama(tiny_config())
    flat, before = FlatLlama(llama), np.asarray(llama.embed[...])
    nnx.update(llama, jax.tree.map(jnp.zeros_like, nnx.state(llama)))
    assert np.any(before)
    assert not np.any(llama.embed[...])
    np.testing.assert_array_equal(flat.llama().embed[...], before)


def test_a_step_takes_it_in_place_of_the_module_and_takes_nothing_apart():
    llama = random_llama(tiny_config())
    step = jax.jit(decode_step)

    def logits(model: nnx.Module | FlatLlama) -> jax.Array:
        cache = init_cache("kivi:bits=4,group_size=16", llama.config, batch=1, capacity=64)
        return step(model, cache, jnp.array([3]))[0]

    flat = FlatLlama(llama)
    np.testing.assert_array_equal(logits(flat), logits(llama))
    other = random_llama(tiny_config(), seed=1)
    assert not np.array_equal(logits(FlatLlama(other)), logits(llama))
    tree = jax.tree.structure(flat)
    assert tree.num_nodes == tree.num_leaves + 1
