"""A hand-written decoder: one `lax.scan` over stacked layers, without positions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.hosts import host
from benchmarks.hosts.host import BATCH, HEAD_DIM, HEADS, KV_HEADS, LAYERS, STREAMS, VOCAB, WIDTH

SHAPES = {
    "q": (WIDTH, HEADS, HEAD_DIM),
    "k": (WIDTH, KV_HEADS, HEAD_DIM),
    "v": (WIDTH, KV_HEADS, HEAD_DIM),
    "o": (HEADS, HEAD_DIM, WIDTH),
    "up": (WIDTH, 2 * WIDTH),
    "down": (2 * WIDTH, WIDTH),
}
SIZES = {"q": 3 * WIDTH**-0.5, "o": (HEADS * HEAD_DIM) ** -0.5, "down": (2 * WIDTH) ** -0.5}


@functools.cache
def weights() -> tuple[Array, dict[str, Array]]:
    """Return a random embedding and stacked layers whose attention has peaks."""
    embedding, *keys = jax.random.split(jax.random.key(2), 1 + len(SHAPES))
    layers = {
        name: SIZES.get(name, WIDTH**-0.5) * jax.random.normal(key, (LAYERS, *shape))
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    return jax.random.normal(embedding, (VOCAB, WIDTH)), layers


def through_plan(plan: kvq.cache.CachePlan, cache: Any, q: Array, k: Array, v: Array) -> Any:
    return plan.attend(cache, q, k, v, prefill=q.shape[1] > 1)


def start(plan: kvq.cache.CachePlan, batch: int) -> Any:
    return jax.vmap(lambda _: plan.init(batch))(jnp.arange(LAYERS))


def through_rows(cache: Any, q: Array, k: Array, v: Array) -> Any:
    """Attend through a dense cache of the model's own: keys, values and how many there are."""
    keys, values, length = cache
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k, length, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(values, v, length, axis=1)
    position = length + jnp.arange(q.shape[1])
    mask = jnp.arange(keys.shape[1])[None] <= position[:, None]
    out = jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None])
    return out, (keys, values, length + q.shape[1])


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="caches")
def forward(
    plan: kvq.cache.CachePlan | None, model: Any, caches: Any, tokens: Array
) -> tuple[Array, Any]:
    """Return the logits [B, V] after the last of new tokens [B, T], and the caches."""
    embedding, layers = model
    attend = through_rows if plan is None else functools.partial(through_plan, plan)

    def normed(h: Array) -> Array:
        return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)

    def layer(h: Array, entry: Any) -> tuple[Array, Any]:
        w, cache = entry
        q, k, v = (jnp.einsum("btd,dnh->btnh", normed(h), w[name]) for name in "qkv")
        out, cache = attend(cache, q, k, v)
        h = h + jnp.einsum("btnh,nhd->btd", out, w["o"])
        return h + jax.nn.silu(normed(h) @ w["up"]) @ w["down"], cache

    h, caches = jax.lax.scan(layer, embedding[tokens], (layers, caches))
    return normed(h[:, -1]) @ embedding.T, caches


class Scan(host.Host):
    name = "a hand-written scan over layers"
    package = "jax"
    adapter = None
    your_code = (host.plan_of, start, through_plan)

    def _empty(self, spec: str | None, batch: int, capacity: int) -> tuple[Any, Any]:
        if spec is not None:
            plan = host.plan_of(spec, capacity)
            return plan, start(plan, batch)
        shape = (LAYERS, batch, capacity, KV_HEADS, HEAD_DIM)
        return None, (jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(LAYERS, jnp.int32))

    def generate(self, spec: str | None) -> host.Generated:
        plan, caches = self._empty(spec, BATCH, 256)
        tokens, drawn, rows = jnp.asarray(host.prompts(padded=False)), [], []
        for _ in range(host.STEPS):
            logits, caches = forward(plan, weights(), caches, tokens)
            tokens = jnp.argmax(logits, axis=-1, keepdims=True)
            drawn.append(tokens[:, 0])
            rows.append(logits)
        return np.stack(drawn, axis=1), np.stack(rows, axis=1)

    def step(self, spec: str | None, rows: Any, capacity: int) -> Any:
        plan, caches = self._empty(spec, STREAMS, capacity)
        k, v = (jnp.stack(side) for side in zip(*rows, strict=True))
        if plan is None:
            room = [(0, 0)] * 2 + [(0, capacity - k.shape[2])] + [(0, 0)] * 2
            caches = jnp.pad(k, room), jnp.pad(v, room), jnp.full(LAYERS, k.shape[2], jnp.int32)
        else:
            caches = jax.jit(jax.vmap(plan.append))(caches, k, v)
        tokens = jnp.ones((STREAMS, 1), jnp.int32)
        return lambda state: forward(plan, weights(), state, tokens), caches, caches


HOSTS = (Scan(),)
