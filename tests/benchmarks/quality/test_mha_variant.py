"""The MHA variant: the same function before training, heads that are told apart, and a run from corpus to checkpoint."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality import mha_variant
from kvq_models import EMBEDDED, forward, load_llama, save_llama
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tools.embedded_model import state
from tools.embedded_model.synthetic import NEEDLE_FACT, NEEDLE_PROMPT, PASSKEY_FACT, PASSKEY_PROMPT
from tools.embedded_model.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "green", "birds", "sing", "and", "stones"]


@pytest.fixture(scope="module")
def embedded():
    return load_llama(EMBEDDED, dtype="float32")[0]


def test_repeated_kv_heads_give_the_models_own_logits(embedded):
    copies = mha_variant.repeat_kv_heads(embedded)
    assert copies.config.num_key_value_heads == copies.config.num_attention_heads == 4
    assert copies.layers[0].k_proj.kernel[...].shape == (256, 256)
    tokens = jax.random.randint(jax.random.key(0), (2, 48), 0, embedded.config.vocab_size)
    logits = jax.jit(forward)
    expected = logits(embedded, tokens)
    np.testing.assert_allclose(logits(copies, tokens), expected, atol=1e-4)

    parameters = state.parameters_of(copies)
    name = "layers/0/k_proj/kernel/value"
    parameters[name] = parameters[name].reshape(256, 2, 2, 64).swapaxes(1, 2).reshape(256, 256)  # copies side by side, not grouped
    assert float(jnp.abs(logits(state.with_parameters(copies, parameters), tokens) - expected).max()) > 0.1


def test_a_repeated_head_has_its_bias():
    llama = random_llama(tiny_config("qwen2"), seed=1)
    copies = mha_variant.repeat_kv_heads(llama)
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, llama.config.vocab_size)
    np.testing.assert_allclose(jax.jit(forward)(copies, tokens), jax.jit(forward)(llama, tokens), atol=1e-4)


def test_cosines_are_one_between_copies_and_fall_with_noise(embedded):
    copies = mha_variant.repeat_kv_heads(embedded)
    for side, layers in mha_variant.sibling_cosines(copies, 2).items():
        np.testing.assert_allclose(layers, 1, atol=1e-6, err_msg=side)
    disturbed = mha_variant.disturb(copies, 0.5, seed=0)
    for side, layers in mha_variant.sibling_cosines(disturbed, 2).items():
        assert len(layers) == 4
        assert np.max(layers) < 0.95, f"{side}: noise of half of the weights' size must show"
        np.testing.assert_allclose(layers, 1 / (1 + 0.5**2), atol=0.07, err_msg=f"{side}: cosine of s + n and s + n', |n| = |s| / 2")
    before, after = state.parameters_of(copies), state.parameters_of(disturbed)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers/{layer}/{p}/kernel/value" for layer in range(4) for p in ("k_proj", "v_proj")}


def test_siblings_are_the_heads_of_one_group_and_nobody_else(embedded):
    copies = mha_variant.repeat_kv_heads(embedded)
    strangers = mha_variant.sibling_cosines(copies, 4)["k"]  # all four heads as one family: two pairs of copies, four pairs of strangers
    assert np.max(strangers) < 0.8
    with pytest.raises(ValueError, match="no siblings"):
        mha_variant.sibling_cosines(copies, 1)


def sentences(count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return "\n".join(" ".join(rng.choice(WORDS, 12)) + "." for _ in range(count))


@pytest.fixture
def small(tmp_path):
    """Return a directory with a random tied model, its tokenizer, and a corpus."""
    (tmp_path / "corpus").mkdir()
    documents = [sentences(40, seed) for seed in range(300)]
    (tmp_path / "corpus/toy.txt").write_text("".join(f"{document}\n{END_OF_TEXT}\n" for document in documents))
    facts = [PASSKEY_FACT, PASSKEY_PROMPT, NEEDLE_FACT, NEEDLE_PROMPT]
    tokenizer = train_tokenizer([*documents[:20], *200 * facts], 300)
    fields = {
        "vocab_size": tokenizer.get_vocab_size(),
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    save_llama(random_llama(tiny_config(bos_token_id=0, eos_token_id=0, **fields)), tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model", 2048)
    return tmp_path


def run(directory, *more):
    places = [f"--{name}={directory / folder}" for name, folder in (("corpus", "corpus"), ("model", "model"), ("out", "out"))]
    with jax.numpy_dtype_promotion("standard"):  # optax's bias correction mixes Python floats and int32 counts
        return mha_variant.main([*places, "--held-out-rows=1", *more])


def test_a_run_writes_a_model_that_loads_and_says_what_training_did(small, capsys):
    assert run(small, "--steps=3", "--tokens-per-step=1024") == 0, capsys.readouterr().err
    llama, tokenizer = load_llama(small / "out", dtype="float32")
    assert llama.config.num_key_value_heads == 4
    assert tokenizer("the quick").input_ids[0] == 0
    history = json.loads((small / "out/history.json").read_text())
    assert [entry["step"] for entry in history["steps"]] == [1, 2, 3]
    assert history["copies"]["perplexity"] == pytest.approx(history["original"]["perplexity"], rel=1e-5)
    assert history["disturbed"]["perplexity"] != history["copies"]["perplexity"]
    assert history["uptrained"]["perplexity"] < history["disturbed"]["perplexity"]
    assert history["uptrained"]["cosines"]["k"] == mha_variant.sibling_cosines(llama, 2)["k"]
    assert history["settings"]["steps"] == 3
    assert "mean cosine between copies: keys 1.000" in capsys.readouterr().out


def test_bad_input_is_one_line(small, capsys):
    save_llama(random_llama(tiny_config(num_key_value_heads=4, tie_word_embeddings=True)), small / "model")
    assert run(small) == 1
    assert capsys.readouterr().err == "error: every one of the 4 query heads has a KV head of its own already\n"
    save_llama(random_llama(tiny_config("qwen2", tie_word_embeddings=True)), small / "model")
    assert run(small) == 1
    assert "without biases" in capsys.readouterr().err
    assert not (small / "out").exists(), "nothing is written for a model that cannot be trained"
