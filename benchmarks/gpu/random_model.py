"""A Llama with random weights and a cache with random content, made on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.gpu.device_timing import uniform
from benchmarks.gpu.random_bodies import random_body
from kvq_jax.layer.plan import LayerState
from kvq_models import Llama, LlamaConfig
from kvq_models.llama.model import abstract_llama

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=4096,
)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _uniform(shape: tuple[int, ...], dtype: str, seed: Array, low: Array, high: Array) -> Array:
    return (uniform(shape, seed, 0.0, 1.0) * (high - low) + low).astype(dtype)


def random_llama(config: LlamaConfig) -> Llama:
    """Return a model with random bf16 weights of usual sizes."""

    def weight(seed: int, struct: jax.ShapeDtypeStruct) -> Array:
        low, high = (0.9, 1.1) if len(struct.shape) == 1 else (-0.035, 0.035)
        return _uniform(
            struct.shape, "bfloat16", jnp.uint32(seed), jnp.float32(low), jnp.float32(high)
        )

    structs, tree = jax.tree.flatten(abstract_llama(config, "bfloat16"))
    return jax.tree.unflatten(tree, [weight(i, struct) for i, struct in enumerate(structs)])


def random_cache(
    spec: str, config: LlamaConfig, batch: int, tokens: int, capacity: int
) -> kvq.cache.Cache:
    """Return a random cache of `tokens` tokens in each batch row."""
    empty = kvq.cache.layout(spec, config, batch, capacity, "bfloat16")

    @functools.cache
    def maker(plan: Any) -> Callable[[Array], LayerState]:
        def make(seed: Array) -> LayerState:
            layout = plan.layout(batch, "bfloat16")
            body = tuple(
                random_body(
                    codec.body(batch, plan.heads, plan.regions.body_capacity),
                    seed * 2 + jnp.uint32(i),
                )
                for i, codec in enumerate(plan.codecs)
            )
            sink, ring = jax.tree.map(
                lambda s: uniform(s.shape, seed + jnp.uint32(99), -1.0, 1.0, s.dtype),
                (layout.sink, layout.ring),
            )
            empty = plan.init(batch, "bfloat16")
            return dataclasses.replace(empty, sink=sink, ring=ring, body=body)

        return jax.jit(make)

    layers = tuple(maker(plan)(jnp.uint32(i)) for i, plan in enumerate(empty.plans))
    return dataclasses.replace(empty, layers=layers, lengths=jnp.full((batch,), tokens, jnp.int32))
