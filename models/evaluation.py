"""What a cache does to a model's predictions, measured through the cache itself: every token is scored against the codes that decoding
would have read, never by a simulation of them.

    perplexity = exp(mean -log p(token)),   KL = mean sum_v p_exact(v) (log p_exact(v) - log p(v)),   agreement: of the likeliest tokens
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.cache import Cache, init_cache
from kvq_jax.spec import CacheSpec, parse
from models.decoding import decode_step, prefill
from models.llama import Llama, forward

STEP = 32  # tokens of one decode step, which equals as many steps of one token


@dataclasses.dataclass(frozen=True)
class Quality:
    """Means over the scored tokens: all but the first of each row, or those after the prompt and the first that follows it."""

    tokens: int
    nats: float  # -log p(token)
    kl: float  # of the exact model's distribution from that of the cache
    agreement: float  # share of tokens whose likeliest successor is the exact model's

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


class _Sums(NamedTuple):
    nats: Array
    kl: Array
    agreement: Array


def measure(llama: Llama, spec: CacheSpec | str, rows: Int[Array, "B T"], prompt: int = 0) -> Quality:
    """Scores rows of tokens, one step after the other; the first `prompt` tokens of each are prefilled and not scored. `llama` carries the
    method's parameters, if it has any.

    A method with prompt statistics (a key norm, a query subspace) has none without a prompt. ValueError where the rows do not fit the
    vocabulary, or the prompt leaves fewer than two tokens.
    """
    spec, (batch, length) = parse(spec), rows.shape
    if not 0 <= int(jnp.min(rows)) <= int(jnp.max(rows)) < llama.config.vocab_size:
        raise ValueError(f"token ids must be between 0 and {llama.config.vocab_size - 1}")
    if not 0 <= prompt <= length - 2:
        raise ValueError(f"a prompt of {prompt} tokens leaves fewer than two of {length} to score")
    steps = -(-(length - prompt) // STEP)
    cache = init_cache(spec, llama.config, batch, prompt + steps * STEP, llama.embed[...].dtype)
    if prompt:
        _, cache = prefill(llama, cache, rows[:, :prompt])
    sums = _measured(llama, cache, rows, prompt)
    tokens = batch * (length - prompt - 1)
    return Quality(tokens, *(float(total) / tokens for total in sums))


@functools.partial(jax.jit, static_argnames="prompt")
def _measured(llama: Llama, cache: Cache, rows: Int[Array, "B T"], prompt: int) -> _Sums:
    exact = forward(llama, rows)[:, prompt:]
    rows = rows[:, prompt:]
    length = rows.shape[1]
    steps = -(-length // STEP)
    padding = ((0, 0), (0, steps * STEP + 1 - length))
    rows, exact = jnp.pad(rows, padding), jnp.pad(exact, (*padding, (0, 0)))

    def step(cache: Cache, i: Array) -> tuple[Cache, _Sums]:
        now, following, wanted = (lax.dynamic_slice_in_dim(a, i * STEP + at, STEP, 1) for a, at in ((rows, 0), (rows, 1), (exact, 0)))
        logits, cache = decode_step(llama, cache, now)
        scored = jnp.broadcast_to(i * STEP + jnp.arange(STEP) + 1 < length, now.shape)
        return cache, _compare(logits, wanted, following, scored)

    _, sums = lax.scan(step, cache, jnp.arange(steps))
    return jax.tree.map(lambda parts: jnp.sum(parts, dtype=jnp.float32), sums)


def _compare(logits: Float[Array, "B T V"], exact: Float[Array, "B T V"], following: Int[Array, "B T"], scored: Array) -> _Sums:
    found, wanted = jax.nn.log_softmax(logits), jax.nn.log_softmax(exact)
    nats = -jnp.take_along_axis(found, following[..., None], axis=-1)[..., 0]
    kl = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    agreement = (jnp.argmax(found, axis=-1) == jnp.argmax(wanted, axis=-1)).astype(jnp.float32)
    return _Sums(*(jnp.sum(jnp.where(scored, term, 0)) for term in (nats, kl, agreement)))
