"""Models of google-tunix with a quantized cache, in tunix' own sampler, beside its own cache."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed")

from flax import nnx

import kvq_jax as kvq

with warnings.catch_warnings(action="ignore"):  # tunix' own, of deprecated calls
    from tunix.generate import utils
    from tunix.generate.sampler import CacheConfig, Sampler

    from kvq_hosts import tunix

pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.filterwarnings("ignore")]
PROMPTS = ["a b c d e f g h", "k l m"]
STEPS, SIZE, VOCAB = 24, 64, 64


class Letters:
    """A tokenizer of letters: a is 3, b is 4, and 0, 1, 2 are padding, start and end."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 3 for letter in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def model_of(family: str) -> Any:
    """Return a small random model whose attention has peaks."""
    module = getattr(tunix, family)
    sizes = dict(embed_dim=64, hidden_dim=128, num_heads=4, head_dim=32, num_kv_heads=2)
    if family == "gemma3":  # five layers with windows, and one without
        own = dict(num_layers=6, num_embed=VOCAB, sliding_window_size=8, param_dtype="float32")
        model = module.Gemma3(module.ModelConfig(**sizes, **own), rngs=nnx.Rngs(0))
        for layer in model.layers:
            layer.attn._query_norm.scale.value += 2
        return model
    own = dict(num_layers=2, vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6)
    model = getattr(module, family.capitalize())(
        module.ModelConfig(**sizes, **own), rngs=nnx.Rngs(0)
    )
    for layer in model.layers:
        layer.attn.q_proj.w.value *= 40
        layer.attn.k_proj.w.value *= 40
    return model


def sampled(model: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, their log-probabilities) [B, T] that tunix' sampler makes of the prompts."""
    sampler = Sampler(model, Letters(), CacheConfig(SIZE, len(model.layers), 2, 32))
    # tunix masks a generated token that has the padding's id, as no cache of kvq does
    options |= dict(eos_tokens=[VOCAB + 1], forbidden_tokens=[0], return_logprobs=True)
    out = sampler(PROMPTS, STEPS, **options)
    return np.stack(out.tokens), np.stack(out.logprobs)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma3"])
def test_the_exact_cache_samples_what_tunix_samples(family: str):
    model = model_of(family)
    tokens, expected = sampled(model)
    same, found = sampled(tunix.with_cache(model, "dense"))
    np.testing.assert_array_equal(same, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    _, coarse = sampled(tunix.with_cache(model, "int2:sink=0,recent=0,block=8"))
    assert np.abs(coarse - expected).max() > 1e-2, "the cache is not read"


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_a_token_with_the_paddings_id_inside_a_prompt_is_read(family: str):
    model = tunix.with_cache(model_of(family), "dense")
    tokens = jnp.asarray([[0, 0, 5, 6, 7, 0, 8, 9]])
    positions = jnp.maximum(jnp.arange(8) - 2, 0)[None]

    def read(visible: jax.Array) -> tuple[np.ndarray, list[int]]:
        mask = utils.make_causal_attn_mask(visible, SIZE)
        logits, cache = model(tokens, positions, model.init_cache(1, SIZE, "float32"), mask)
        return np.asarray(logits)[:, 2:], [int(layer.lengths[0]) for layer in cache.values()]

    logits, lengths = read(tokens != 0)
    expected, _ = read(jnp.arange(8)[None] >= 2)
    np.testing.assert_array_equal(logits, expected)
    assert set(lengths) == {6}


def test_beams_move_with_their_caches():
    model = model_of("llama3")
    tokens, _ = sampled(model, beam_size=3)
    same, _ = sampled(tunix.with_cache(model, "dense"), beam_size=3)
    np.testing.assert_array_equal(same, tokens)
    assert len({tuple(row) for row in tokens}) == len(PROMPTS)


def test_the_model_is_not_changed_and_its_cache_is_smaller():
    model = model_of("llama3")
    quantized = tunix.with_cache(model, "kivi:bits=4,recent=8,block=8,sink=0,group_size=8")
    assert not hasattr(model, "init_cache")
    cache = quantized.init_cache(2, 1024, "float32")
    dense = 2 * 2 * 2 * 1024 * 2 * 32 * 4
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert stored < 0.5 * dense
    assert all(isinstance(layer, kvq.cache.LayerCache) for layer in cache.values())


def test_what_has_no_adapter_is_refused():
    with pytest.raises(NotImplementedError, match="Linear has no adapter: Llama3, "):
        tunix.with_cache(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "kivi")
    with pytest.raises(ValueError, match="unknown cache method 'kiwi'"):
        tunix.with_cache(model_of("llama3"), "kiwi")
    with pytest.raises(ValueError, match=r"tunix gives a cache queries, .* needs k_pre"):
        tunix.with_cache(model_of("llama3"), "kivi:pre_rope=true")
