"""Prefilling several caches together leaves each cache as a separate prefill does."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import prefill, prepare
from kvq_models.inference import layer_programs
from kvq_models.inference.layer_by_layer import prefill_together
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config

SPECS = ("squat:rank=3,sink=0,recent=8,block=8", "xquant_cl:base_layer=0,block=8")
LENGTH = 40


def test_each_cache_is_the_one_of_its_own_prefill():
    llama, tokens = random_llama(tiny_config()), random_tokens((2, LENGTH))
    models = [prepare(llama, spec) for spec in SPECS]

    def new() -> list[kvq.cache.Cache]:
        return [kvq.init_cache(spec, llama.config, 2, 64, "float32") for spec in SPECS]

    logits, together = prefill_together(models, new(), tokens)
    for model, spec, cache, shared in zip(models, SPECS, new(), together, strict=True):
        own_logits, own = prefill(model, cache, tokens)
        assert row_errors(logits, own_logits).max() < 1e-5, spec
        assert np.asarray(shared.lengths).tolist() == [LENGTH, LENGTH], spec
        read, expected = (prefill(model, copy, tokens[:, :4])[0] for copy in (shared, own))
        assert row_errors(read, expected).max() < 1e-4, (
            f"{spec}: what is read from the two caches differs"
        )
        _, other = prefill(
            model, kvq.init_cache(spec, llama.config, 2, 64, "float32"), tokens[:, ::-1]
        )
        assert row_errors(prefill(model, other, tokens[:, :4])[0], expected).max() > 1e-3, (
            f"{spec}: another prompt is read alike"
        )


def test_a_cache_alone_is_the_one_of_its_own_prefill():
    llama, tokens = random_llama(tiny_config()), random_tokens((2, LENGTH))
    first, second = (kvq.init_cache("dense", llama.config, 2, 64, "float32") for _ in range(2))
    logits, (cache,) = prefill_together([llama], [first], tokens)
    expected, _ = prefill(llama, second, tokens)
    assert row_errors(logits, expected).max() < 1e-5
    assert np.asarray(cache.lengths).tolist() == [LENGTH, LENGTH]
    other, _ = prefill_together(
        [llama], [kvq.init_cache("dense", llama.config, 2, 64, "float32")], tokens[:, ::-1]
    )
    assert row_errors(other, expected).max() > 1e-3, "another prompt has the same logits"


def test_a_cache_that_holds_tokens_is_refused():
    llama, tokens = random_llama(tiny_config()), random_tokens((2, 8))
    _, held = prefill(llama, kvq.init_cache("dense", llama.config, 2, 64, "float32"), tokens)
    with pytest.raises(
        ValueError, match="a cache holds 8 tokens; prompts that are shared go into empty caches"
    ):
        prefill_together([llama], [held], jnp.asarray(tokens))


def test_programs_of_caches_that_were_not_used_for_long_are_forgotten():
    llama = random_llama(tiny_config(num_hidden_layers=1))
    model, options = jax.tree.structure(llama), layer_programs.PassOptions(prefill=True)

    def programs(capacity: int) -> layer_programs.Calls:
        cache = kvq.cache.layout("dense", llama.config, 1, capacity)
        return layer_programs.calls(model, jax.tree.structure(cache), options)

    capacity = 10_000  # of no other test, whose programs may be kept already
    first = programs(capacity)
    assert programs(capacity) is first
    layer, input_of_layers = weakref.ref(first.layers[0].program), weakref.ref(first.first)
    del first
    for more in range(layer_programs.PROGRAMS):
        programs(capacity + 1 + more)
    gc.collect()
    assert (layer(), input_of_layers()) == (None, None)
