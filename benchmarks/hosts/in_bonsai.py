"""bonsai's Qwen 3 in its own `forward` and greedy sampler. `forward` donates no cache."""

# pyright: reportMissingImports=false
# the host need not be installed where types are checked

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bonsai.models.qwen3 import modeling
from bonsai.utils.samplers import GreedySampler
from flax import nnx

from benchmarks.hosts import host
from benchmarks.hosts.host import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PROMPT,
    STEPS,
    STREAMS,
    VOCAB,
    WIDTH,
)
from kvq_hosts.bonsai import with_cache


@functools.cache
def qwen() -> modeling.Qwen3:
    """Return a random Qwen 3 whose attention has peaks."""
    sizes = dict(num_layers=LAYERS, vocab_size=VOCAB, emb_dim=WIDTH, mlp_dim=2 * WIDTH)
    heads = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    rope = dict(rope_theta=1_000_000, rope_scaling_factor=8.0, local_rope_theta=1e4)
    options = dict(norm_eps=1e-6, tie_word_embeddings=False)
    config = modeling.ModelConfig(**sizes, **heads, **rope, **options)
    model = modeling.Qwen3(config, rngs=nnx.Rngs(0))
    for layer in model.layers:
        layer.attn.q_norm.scale.set_value(1.5 * layer.attn.q_norm.scale[...])
    return model


def quantized(spec: str, batch: int, prompt: int, steps: int) -> tuple[modeling.Qwen3, Any]:
    return with_cache(qwen(), spec, batch, prompt, steps, "float32")


def model_and_cache(spec: str | None, batch: int, prompt: int, steps: int) -> Any:
    if spec is not None:
        return quantized(spec, batch, prompt, steps)
    return qwen(), modeling.init_cache(qwen().config, batch, prompt, steps, jnp.float32)


class Bonsai(host.Host):
    name = "bonsai Qwen 3"
    package = "jax-bonsai"
    adapter = "kvq_hosts/bonsai.py"
    your_code = (quantized,)

    def generate(self, spec: str | None) -> host.Generated:
        model, cache = model_and_cache(spec, BATCH, PROMPT, STEPS)
        sampler, key = jax.jit(GreedySampler()), jax.random.key(0)
        tokens, drawn, rows = jnp.asarray(host.prompts(padded=True)), [], []
        for _ in range(STEPS):
            logits, cache = modeling.forward(model, cache, tokens, 0)
            tokens = sampler(logits.at[:, 0].set(-jnp.inf), key=key)  # 0 is padding
            drawn.append(tokens[:, 0])
            rows.append(logits)
        return np.stack(drawn, axis=1), np.stack(rows, axis=1)

    def step(self, spec: str | None, rows: Any, capacity: int) -> Any:
        length = rows[0][0].shape[1]
        model, cache = model_and_cache(spec, STREAMS, length, capacity - length)
        room = ((0, 0), (0, capacity - length), (0, 0), (0, 0))
        for layer, (k, v) in zip(cache, rows, strict=True):
            if spec is None:
                layer.k_cache.set_value(jnp.pad(k, room))
                layer.v_cache.set_value(jnp.pad(v, room))
                layer.start_ind.set_value(jnp.zeros(STREAMS, jnp.int32))
            else:
                layer.kept.set_value(host.appended(layer.plan, (k, v)))
            layer.cur_ind.set_value(jnp.int32(length))
        tokens = jnp.ones((STREAMS, 1), jnp.int32)
        return lambda state: modeling.forward(model, state, tokens, 0), cache, cache


HOSTS = (Bonsai(),)
