"""Layers of Flax Linen under `nn.scan`, one token a call: Linen's cache reads no prompts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.hosts import host
from benchmarks.hosts.host import BATCH, HEADS, LAYERS, STREAMS, VOCAB, WIDTH
from kvq_hosts.linen import cached_attention


def attention_of(module: nn.Module, plan: kvq.cache.CachePlan, tokens: int) -> nn.Module:
    attend = cached_attention(module, plan, prefill=tokens > 1)
    return nn.MultiHeadDotProductAttention(
        HEADS, qkv_features=FEATURES, attention_fn=attend, name="attention"
    )


FEATURES = HEADS * host.HEAD_DIM


class Block(nn.Module):
    """A layer with a cache of kvq, or with Linen's if there is no plan."""

    plan: kvq.cache.CachePlan | None

    @nn.compact
    def __call__(self, x: Array, _: Any) -> tuple[Array, None]:
        if self.plan is None:
            attention = nn.MultiHeadDotProductAttention(
                HEADS, qkv_features=FEATURES, decode=True, name="attention"
            )
        else:
            attention = attention_of(self, self.plan, x.shape[1])
        x = x + attention(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class Model(nn.Module):
    plan: kvq.cache.CachePlan | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        axes: Any = {"params": 0, "cache": 0}
        layers = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        x = layers(self.plan, name="layers")(x, None)[0]
        return nn.Dense(VOCAB)(nn.LayerNorm()(x[:, -1]))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def apply(model: Model, params: Any, cache: Any, tokens: Array) -> tuple[Array, Any]:
    logits, kept = model.apply({"params": params, "cache": cache}, tokens, mutable="cache")
    return logits, kept["cache"]


class Linen(host.Host):
    name = "Flax Linen, layers in `nn.scan`"
    package = "flax"
    adapter = "kvq_hosts/linen.py"
    your_code = (host.plan_of, attention_of)
    kv_heads = HEADS

    def _of(self, spec: str | None, batch: int, capacity: int) -> tuple[Model, Any, Any]:
        plan = None if spec is None else host.plan_of(spec, capacity, HEADS)
        model = Model(plan)
        empty = jnp.ones((batch, 1 if plan else capacity), jnp.int32)
        variables = jax.jit(model.init)(jax.random.key(3), empty)
        return model, variables["params"], variables["cache"]

    def generate(self, spec: str | None) -> host.Generated:
        model, params, cache = self._of(spec, BATCH, 256)
        prompt = jnp.asarray(host.prompts(padded=False))
        chunks = [prompt] if spec else jnp.split(prompt, prompt.shape[1], axis=1)
        logits = jnp.zeros(())
        for tokens in chunks:
            logits, cache = apply(model, params, cache, tokens)
        drawn, rows = [jnp.argmax(logits, axis=-1)], [logits]
        for _ in range(host.STEPS - 1):
            logits, cache = apply(model, params, cache, drawn[-1][:, None])
            drawn.append(jnp.argmax(logits, axis=-1))
            rows.append(logits)
        return np.stack(drawn, axis=1), np.stack(rows, axis=1)

    def step(self, spec: str | None, rows: Any, capacity: int) -> Any:
        model, params, cache = self._of(spec, STREAMS, capacity)
        k, v = (jnp.stack(side) for side in zip(*rows, strict=True))
        if model.plan is None:
            room = [(0, 0)] * 2 + [(0, capacity - k.shape[2])] + [(0, 0)] * 2
            filled = dict(cached_key=jnp.pad(k, room), cached_value=jnp.pad(v, room))
            filled["cache_index"] = jnp.full(LAYERS, k.shape[2], jnp.int32)
            cache = {"layers": {"attention": filled}}
        else:
            kept = jax.jit(jax.vmap(model.plan.append))(cache["layers"]["layer"], k, v)
            cache = {"layers": {"layer": kept}}
        tokens = jnp.ones((STREAMS, 1), jnp.int32)
        return lambda state: apply(model, params, state, tokens), cache, cache


HOSTS = (Linen(),)
