"""bonsai's Qwen 3 with a quantized cache, through bonsai's own `forward`, beside its own cache."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("bonsai", reason="bonsai is not installed")

from flax import nnx

with warnings.catch_warnings(action="ignore"):  # bonsai's own
    from bonsai.utils.samplers import GreedySampler, Sampler

    from kvq_hosts import bonsai

modeling = bonsai.modeling
pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.filterwarnings("ignore")]
TOKENS, STEPS, VOCAB = 12, 8, 64


def model_of() -> Any:
    """Return a small random model whose attention has peaks."""
    sizes = dict(num_layers=2, vocab_size=VOCAB, emb_dim=64, mlp_dim=128, num_heads=4, head_dim=32)
    rope = dict(rope_theta=1_000_000, rope_scaling_factor=8.0, local_rope_theta=1e4)
    options = dict(num_kv_heads=2, norm_eps=1e-6, tie_word_embeddings=False)
    model = modeling.Qwen3(modeling.ModelConfig(**sizes, **rope, **options), rngs=nnx.Rngs(0))
    for layer in model.layers:
        layer.attn.q_norm.scale.set_value(3 * layer.attn.q_norm.scale[...])
    return model


def sampled(model: Any, cache: Any, sampler: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, logits) of what a sampler of bonsai draws after two prompts, one of them
    padded on the left."""
    prompt = np.random.default_rng(0).integers(1, VOCAB, (2, TOKENS))
    prompt[1, :4] = 0
    tokens, drawn, steps = jnp.asarray(prompt, jnp.int32), [], []
    for key in jax.random.split(jax.random.key(0), STEPS):
        logits, cache = modeling.forward(model, cache, tokens, 0)
        tokens = sampler(logits.at[:, 0].set(-1e9), key=key)  # 0 is padding
        drawn.append(tokens)
        steps.append(logits)
    return np.stack(drawn), np.stack(steps)


NUCLEUS = Sampler(temperature=1.0, top_p=0.8, top_k=10)


@pytest.mark.parametrize("sampler", [GreedySampler(), NUCLEUS], ids=["greedy", "nucleus"])
def test_the_exact_cache_samples_what_bonsai_samples(sampler: Any):
    model = model_of()
    sizes = 2, TOKENS, STEPS, "float32"
    drawn, expected = sampled(model, modeling.init_cache(model.config, *sizes), sampler)
    same, logits = sampled(*bonsai.with_cache(model, "dense", *sizes), sampler)
    np.testing.assert_array_equal(same, drawn)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    coarse = bonsai.with_cache(model, "int2:sink=0,recent=0,block=4", *sizes)
    assert np.abs(sampled(*coarse, sampler)[1] - expected).max() > 1e-2, "the cache is not read"
    assert type(model.layers[0].attn) is modeling.Attention, "the caller's model is changed"


def test_a_token_with_the_paddings_id_inside_a_prompt_is_read():
    model, cache = bonsai.with_cache(model_of(), "dense", 1, 8, STEPS, "float32")
    modeling.forward(model, cache, jnp.asarray([[0, 0, 5, 6, 7, 0, 8, 9]], jnp.int32), 0)
    assert [int(layer.kept.get_value().lengths[0]) for layer in cache] == [6, 6]


def test_what_has_no_adapter_is_refused():
    with pytest.raises(NotImplementedError, match="Linear has no adapter: Qwen3 has one"):
        bonsai.with_cache(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "kivi", 1, 1, 1)
    with pytest.raises(ValueError, match="unknown cache method 'kiwi'"):
        bonsai.with_cache(model_of(), "kiwi", 1, 1, 1)
    with pytest.raises(ValueError, match=r"bonsai gives a cache queries, .*'xquant' needs param"):
        bonsai.with_cache(model_of(), "xquant", 1, 1, 1)
