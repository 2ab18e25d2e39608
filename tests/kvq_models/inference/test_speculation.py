"""Drafts change the number of steps, and nothing else: tokens, log-probabilities and caches are those of greedy `generate`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Llama, generate, generate_drafted, prepare
from kvq_models.inference import speculation
from kvq_models.inference.generation import Generated
from kvq_models.inference.speculation import History, look_up
from tests.exhaustive import some
from tests.kvq_models.checkpoints import random_llama, tiny_config

NEW, CAPACITY, DRAFTS = 48, 96, 4
SPECS = ("dense", "innerq:bits=2,recent=8,block=32", "k=kivi:bits=2+v=dense+cache:recent=8", "xquant_cl:bits=2,base_layer=1,block=32")
# Rows that repeat themselves, at once or after a while, and one that does not; of different lengths.
PROMPTS = np.array([[5, 6, 7, 8] * 5, [*range(20, 40)], [9] * 20], np.int32)
LENGTHS = np.array([19, 20, 3], np.int32)


@functools.cache
def model(spec: str) -> Llama:
    return prepare(random_llama(tiny_config(num_hidden_layers=2)), spec)


def generated(spec: str, drafts: int = 0, **options) -> Generated:
    cache = kvq.init_cache(spec, model(spec).config, len(PROMPTS), CAPACITY, "float32")
    how = functools.partial(generate_drafted, drafts=drafts) if drafts else generate
    return how(model(spec), cache, PROMPTS, LENGTHS, max_new_tokens=NEW, **options)


@pytest.mark.parametrize("spec", some(SPECS, SPECS[1::2]))
def test_drafts_give_the_greedy_tokens(spec: str):
    plain = generated(spec)
    end = int(plain.tokens[0, NEW // 2])
    for eos_ids in ((), (end,)):
        plain, drafted = generated(spec, eos_ids=eos_ids), generated(spec, DRAFTS, eos_ids=eos_ids)
        np.testing.assert_array_equal(drafted.tokens, plain.tokens)
        np.testing.assert_array_equal(drafted.lengths, plain.lengths)
        np.testing.assert_array_equal(drafted.cache.lengths, plain.cache.lengths)
        np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-4)
        assert bool(drafted.finite.all())
    assert int(plain.lengths[0]) < NEW, "no row met an end token"


def test_a_block_that_a_wrong_draft_aged_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    spec = "kivi:bits=2,group_size=8,recent=4,block=8"
    plain = np.asarray(generated(spec).logprobs)
    np.testing.assert_allclose(generated(spec, DRAFTS).logprobs, plain, atol=1e-4)
    monkeypatch.setattr(speculation, "_until_ageing", lambda cache: cache.capacity - cache.lengths - 1)
    jax.clear_caches()
    careless = np.asarray(generated(spec, DRAFTS).logprobs)
    jax.clear_caches()
    assert np.abs(careless - plain).max() > 1e-2


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),
        ([1, 2, 3, 9, 0, 1, 2, 3, 7, 7, 1, 2, 3], [7, 7, 1]),  # the newest place
        ([1, 2, 3, 9, 4, 2, 3, 5, 1, 2, 3], [9, 4, 2]),  # three tokens before two
        ([4, 2, 3, 6, 5, 2, 3], [6, 5, 2]),
        ([7, 5, 6, 5, 6], [5, 6, 5]),  # the row goes on as it began to
        ([5, 5, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 4], [4, 4, 4]),  # nothing is known: any draft would do
        ([3], [3, 3, 3]),
    ],
)
def test_drafts_are_what_followed_the_same_tokens(tokens: list[int], drafted: list[int]):
    padded = jnp.array([tokens + [2, 3] * 3], jnp.int32)  # what lies past the row is not read
    assert jax.jit(look_up, static_argnums=1)(History(padded, jnp.array([len(tokens)], jnp.int32)), 3).tolist() == [drafted]


def test_a_text_that_repeats_itself_takes_fewer_steps():
    spec = SPECS[0]
    cache = kvq.init_cache(spec, model(spec).config, 1, CAPACITY, "float32")
    tokens, lengths = jnp.asarray(PROMPTS[:1]), jnp.asarray(LENGTHS[:1])
    state = speculation.start(model(spec), cache, tokens, lengths, NEW, speculation.Sampling())
    state, history = speculation.advance(
        model(spec), state, speculation.begun_history(tokens, lengths, NEW), jnp.int32(NEW), DRAFTS, eos_ids=()
    )
    assert NEW / (1 + DRAFTS) <= int(state.step) < NEW
    assert history.tokens[0, : LENGTHS[0] + NEW].tolist() == [*PROMPTS[0, : LENGTHS[0]], *state.tokens[0, :NEW].tolist()]


def test_what_cannot_be_drafted_is_refused():
    with pytest.raises(ValueError, match="drafts=0 must be at least 1"):
        generate_drafted(model("dense"), kvq.init_cache("dense", model("dense").config, 3, CAPACITY), PROMPTS, drafts=0)
