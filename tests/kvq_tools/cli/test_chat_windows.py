"""`kvq chat` with sliding windows: a turn that goes back further than a window reads the
conversation again."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Sampling, load_llama, prefill
from kvq_tools.cli.console import UserError
from kvq_tools.cli.conversation import AnswerSettings, Conversation
from kvq_tools.cli.handover import SavedPrompt
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_tools.cli.test_chat import CACHE, CAPACITY, REWRITING, assert_holds, said

FAR, NEAR = 100, 12  # tokens of an answer, beyond a trim's slack of 64 and within it


@pytest.fixture(scope="module")
def windowed(model):
    """Return (a model whose layers have windows, tokenizer)."""
    config = tiny_config("mistral", sliding_window=24, vocab_size=300, max_position_embeddings=512)
    _, tokenizer = load_llama(model, dtype="float32")
    tokenizer.chat_template = REWRITING.replace("END", "|")
    return random_llama(config), tokenizer


def conversation(windowed, new: int, saved: list[int] | None = None) -> Conversation:
    llama, tokenizer = windowed

    def new_cache() -> kvq.cache.Cache:
        cache = kvq.init_cache(CACHE, llama.config, 1, CAPACITY, "float32")
        if saved is None:
            return cache
        return prefill(llama, cache, np.array([saved], np.int32))[1]

    assert all(plan.regions.wraps for plan in new_cache().plans)
    held = saved and SavedPrompt("f", new_cache(), saved, np.zeros((1, 300), np.float32), None)
    settings = AnswerSettings(new, Sampling(), 0, None)
    return Conversation(llama, tokenizer, new_cache, settings, saved=held or None)


def test_a_turn_that_goes_back_beyond_the_window_reads_the_conversation_again(windowed):
    """The template rewrites the first answer, of which the windows have left everything."""
    talk = conversation(windowed, FAR)
    said(talk, "the cat is")
    turn, answer = said(talk, "the dog")
    assert turn.kept == 0
    assert len(turn.tokens) > len("the dog")
    assert_holds(talk, windowed[0], CACHE, [(turn, answer)])


def test_a_turn_that_goes_back_a_little_keeps_the_beginning(windowed):
    talk = conversation(windowed, NEAR)
    first, before = said(talk, "the cat is")
    turn, answer = said(talk, "the dog")
    assert turn.kept >= len(first.tokens)
    assert_holds(talk, windowed[0], CACHE, [(first, before), (turn, answer)])


def test_a_saved_prompt_is_where_a_conversation_begins_again(windowed):
    opening = conversation(windowed, NEAR).turn("the cat is").tokens
    saved = opening[:9]
    talk = conversation(windowed, FAR, saved)
    said(talk, "the cat is")
    turn, _ = said(talk, "the dog")
    assert turn.kept == len(saved)
    assert talk.ids[: len(saved)] == saved
    assert int(talk.cache.lengths[0]) == len(talk.ids)
    assert jnp.isfinite(talk.cache.layers[0].ring[0]).all()

    other = conversation(windowed, FAR, saved)
    said(other, "the cat is")
    other.messages = ({"role": "user", "content": "a dog"},)  # as if a template had rewritten it
    other._text = None
    with pytest.raises(UserError, match="of the 9 in the file, and sliding windows have left"):
        other.turn("the dog")
