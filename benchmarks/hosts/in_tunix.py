"""Models of tunix in its own `Sampler`. A timed step is the model's, as the sampler calls it."""

# pyright: reportMissingImports=false
# the host need not be installed where types are checked

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from benchmarks.hosts import host
from benchmarks.hosts.host import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    STREAMS,
    VOCAB,
    WIDTH,
    WINDOW,
    WITH_WINDOWS,
)
from kvq_hosts.tunix import with_cache

CAPACITY = 512  # the sampler pads a prompt to a power of two
SIZES = dict(embed_dim=WIDTH, hidden_dim=2 * WIDTH, num_heads=HEADS)
SIZES |= dict(head_dim=HEAD_DIM, num_kv_heads=KV_HEADS)
MODELS = {
    "Llama 3": (llama3, llama3.Llama3),
    "Qwen 2": (qwen2, qwen2.Qwen2),
    "Qwen 3": (qwen3, qwen3.Qwen3),
    "Gemma 3": (gemma3, gemma3.Gemma3),
}


class Numbers:
    """A tokenizer of numbers in decimal. 0, 1, 2 are padding, start and end."""

    def encode(self, text: str) -> list[int]:
        return list(map(int, text.split()))

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


@functools.cache
def model_of(family: str) -> Any:
    """Return a random model whose attention has peaks."""
    module, kind = MODELS[family]
    fields = dict(num_layers=LAYERS, vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6)
    if module is gemma3:  # five layers with windows, and one without
        fields = dict(num_layers=WITH_WINDOWS, num_embed=VOCAB, sliding_window_size=WINDOW)
        fields |= dict(param_dtype="float32")
    model = kind(module.ModelConfig(**SIZES, **fields), rngs=nnx.Rngs(0))
    if module in (qwen2, qwen3):
        model.num_embed = VOCAB  # which the sampler reads if it returns logits
    for layer in model.layers:
        if module in (llama3, qwen2):
            for projection in (layer.attn.q_proj, layer.attn.k_proj):
                factor = 4 if module is llama3 else 24  # Qwen 2's initial weights are smaller
                projection.w.set_value(factor * projection.w[...])
        else:  # both are normalized
            norm = layer.attn.q_norm if module is qwen3 else layer.attn._query_norm
            scale = norm.w if module is qwen3 else norm.scale
            scale.set_value(scale[...] + 0.5)
    return model


def quantized(model: Any, spec: str) -> Any:
    return with_cache(model, spec)


class Tunix(host.Host):
    package = "google-tunix"
    adapter = "kvq_hosts/tunix.py"
    your_code = (quantized,)

    def __init__(self, family: str) -> None:
        self.family = family
        self.name = f"tunix {family}"
        self.layers = len(model_of(family).layers)

    def model(self, spec: str | None) -> Any:
        return model_of(self.family) if spec is None else quantized(model_of(self.family), spec)

    def generate(self, spec: str | None) -> host.Generated:
        model = self.model(spec)
        sampler = Sampler(model, Numbers(), CacheConfig(CAPACITY, self.layers, KV_HEADS, HEAD_DIM))
        texts = [" ".join(str(t) for t in row if t) for row in host.prompts(padded=True)]
        # tunix masks a generated token that has the padding's id, as no cache of kvq does
        options = dict(eos_tokens=[VOCAB + 1], forbidden_tokens=[0], return_logits=True)
        out = sampler(texts, host.STEPS, **options)
        return np.stack(out.tokens), np.stack(out.logits)[:, :, 1:]

    def step(self, spec: str | None, rows: Any, capacity: int) -> Any:
        model = self.model(spec)
        graph, params = nnx.split(model)
        tokens = rows[0][0].shape[1]
        room = ((0, 0), (0, capacity - tokens), (0, 0), (0, 0))
        cache = {}
        for i, (k, v) in enumerate(rows):
            if spec is None:
                ends = jnp.full(STREAMS, tokens, jnp.int32)
                cache[f"layer_{i}"] = dict(k=jnp.pad(k, room), v=jnp.pad(v, room), end_index=ends)
            else:
                plan = model.layers[i].attn.kvq.plan(capacity, "float32")
                cache[f"layer_{i}"] = host.appended(plan, (k, v))

        @functools.partial(jax.jit, donate_argnums=1)
        def decode(params: Any, cache: Any, position: Array) -> tuple[Array, Any, Array]:
            mask = jnp.broadcast_to(jnp.arange(capacity) <= position, (STREAMS, 1, capacity))
            token = jnp.ones((STREAMS, 1), jnp.int32)
            positions = jnp.full((STREAMS, 1), position)
            logits, cache = nnx.merge(graph, params)(token, positions, cache, mask)
            return logits[:, -1], cache, position + 1

        def step(state: Any) -> tuple[Array, Any]:
            logits, *state = decode(params, *state)
            return logits, state

        return step, (cache, jnp.int32(tokens)), cache


HOSTS = tuple(map(Tunix, MODELS))
