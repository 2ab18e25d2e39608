"""Drafts only change the number of steps: tokens, log-probabilities and caches equal greedy
`generate`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.layer.regions import SLACK
from kvq_models import Llama, generate, generate_drafted, prepare
from kvq_models.inference import speculation
from kvq_models.inference.generation import Generated
from kvq_models.inference.speculation import History, look_up
from kvq_models.llama.flat_llama import FlatLlama
from tests.exhaustive import some
from tests.kvq_models.checkpoints import random_llama, tiny_config

NEW, CAPACITY, DRAFTS = 48, 96, 4
AGEING = "kivi:bits=2,group_size=8,recent=4,block=8"  # a block ages every 8 tokens
SPECS = (
    "dense",
    AGEING,
    "xquant_cl:bits=2,base_layer=1,block=32",
    "innerq:bits=2,recent=8,block=32",
    "k=kivi:bits=2+v=dense+cache:recent=8",
)
# Rows of different lengths: some repeat themselves, at once or after a while, and one does not.
PROMPTS = np.array([[5, 6, 7, 8] * 5, [*range(20, 40)], [9] * 20], np.int32)
LENGTHS = np.array([19, 20, 3], np.int32)


@functools.cache
def model(spec: str) -> Llama:
    return prepare(random_llama(tiny_config(num_hidden_layers=2)), spec)


@functools.cache
def generated(spec: str, drafts: int = 0, eos_ids: tuple[int, ...] = ()) -> Generated:
    cache = kvq.init_cache(spec, model(spec).config, len(PROMPTS), CAPACITY, "float32")
    how = functools.partial(generate_drafted, drafts=drafts) if drafts else generate
    return how(model(spec), cache, PROMPTS, LENGTHS, max_new_tokens=NEW, eos_ids=eos_ids)


@pytest.mark.parametrize("spec", some(SPECS, SPECS[1:3]))
def test_drafts_give_the_greedy_tokens(spec: str):
    plain, drafted = generated(spec), generated(spec, DRAFTS)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.lengths, plain.lengths)
    np.testing.assert_array_equal(drafted.cache.lengths, plain.cache.lengths)
    # Several tokens at once round sums differently in the last bit of fp32. Where this moves a
    # scale or a zero-point of a block to the next fp16 number, later steps of that row differ by
    # about 2^-11 of a score.
    difference = np.abs(np.asarray(drafted.logprobs) - np.asarray(plain.logprobs))
    assert np.median(difference) < 1e-5
    assert difference.max() < 1e-3
    assert bool(drafted.finite.all())


@pytest.mark.parametrize("spec", some(("dense", AGEING), ("dense",)))
def test_more_drafts_than_a_sliding_window_gives_back_are_not_taken(spec: str):
    config = tiny_config(num_hidden_layers=1, model_type="mistral", sliding_window=24)
    llama, drafts = random_llama(config), 2 * SLACK
    plain, drafted = (
        generates(llama, kvq.init_cache(spec, config, 2, 256, "float32"), PROMPTS[:2])
        for generates in (
            functools.partial(generate, max_new_tokens=96),
            functools.partial(generate_drafted, max_new_tokens=96, drafts=drafts),
        )
    )
    assert all(plan.regions.wraps for plan in plain.cache.plans)
    assert drafts > plain.cache.plans[0].regions.slack, "the control: they do not fit"
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert bool(drafted.finite.all())


def test_drafts_end_with_an_end_token():
    plain = np.asarray(generated(AGEING).tokens)
    end = int(plain[0, NEW // 2])
    drafted = generated(AGEING, DRAFTS, (end,))
    for row, tokens in enumerate(plain.tolist()):
        length = tokens.index(end) + 1 if end in tokens else NEW
        assert int(drafted.lengths[row]) == length, f"{row=}"
        assert drafted.tokens[row, :length].tolist() == tokens[:length], f"{row=}"
        assert int(drafted.cache.lengths[row]) == LENGTHS[row] + length, f"{row=}"
    assert int(drafted.lengths[0]) < NEW, "no row met an end token"


def test_a_block_that_a_wrong_draft_aged_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    plain, traced = np.asarray(generated(AGEING).logprobs), speculation.advance.__wrapped__
    monkeypatch.setattr(speculation, "_room", lambda cache: cache.capacity - cache.lengths - 1)
    # traces it anew
    monkeypatch.setattr(
        speculation, "advance", jax.jit(lambda *given: traced(*given), static_argnums=5)
    )
    careless = np.asarray(generated.__wrapped__(AGEING, DRAFTS).logprobs)
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
    padded = jnp.array([tokens + [2, 3] * 3], jnp.int32)  # tokens past the row are not read
    assert jax.jit(look_up, static_argnums=1)(
        History(padded, jnp.array([len(tokens)], jnp.int32)), 3
    ).tolist() == [drafted]


def test_a_text_that_repeats_itself_takes_fewer_steps():
    llama, tokens, lengths = (
        model("dense"),
        jnp.asarray(PROMPTS[[0, 0, 0]]),
        jnp.asarray(LENGTHS[[0, 0, 0]]),
    )
    settings = speculation.generation_settings(NEW)
    state = speculation.start(
        llama,
        kvq.init_cache("dense", llama.config, 3, CAPACITY, "float32"),
        tokens,
        lengths,
        settings,
    )
    begun = speculation.begun_history(tokens, lengths, NEW)
    state, history = speculation.advance(
        FlatLlama(llama), state, begun, settings, jnp.int32(NEW), DRAFTS
    )
    assert NEW / (1 + DRAFTS) <= int(state.step) < NEW
    assert history.tokens[0, : LENGTHS[0] + NEW].tolist() == [
        *PROMPTS[0, : LENGTHS[0]],
        *state.tokens[0, :NEW].tolist(),
    ]
