"""Run a Llama through a cache: prompt tokens in (`prefill`), generated tokens in (`decode_step`),
log-probabilities out (`score`).

All three are cache in, cache out. `prefill` and `score` compile themselves and consume the cache
(its buffers are reused: continue with the returned one). `decode_step` is a pure function for your
own `jax.jit(..., donate_argnames="cache")`.

A cache has its model's dtype unless you pass another to `init_cache`. In that case full-precision
rows (all rows of `dense`) are rounded to the cache's dtype, and logits differ from a model without
a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.step import begin
from kvq_jax.placement.crossing import crossing
from kvq_jax.types.array_types import Integers, LengthsB
from kvq_jax.types.integers import int32
from kvq_models.inference.checked_input import check_dims, checked_tokens
from kvq_models.inference.layers import run_layers
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.padding import resized
from kvq_models.inference.prompts import read_prompt
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama

SCORE_CHUNK = 32  # tokens that `score` decodes in one step


def prefill(
    llama: Llama,
    cache: Cache,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    logits: Literal["last", "all"] = "last",
    implementation: Implementation = None,
) -> tuple[Float[Array, "..."], Cache]:
    """Add prompts to a cache and return (logits, cache).

    Args:
        llama: the model, prepared for the cache's spec.
        cache: for B rows; its buffers are consumed.
        tokens: [B, T] integers, right-padded.
        lengths: [B] integers, new tokens of each row (default: T). A row of length 0 is unchanged.
        logits: "last" for [B, V] after each row's last token, "all" for [B, T, V]; both fp32.
            Padding and rows of length 0 get nan.
        implementation: the one that quantizes the prompt, see `decode_step`.

    Attention inside the prompt is exact. Tokens that the cache held before are read from it,
    quantized or in its windows. One layer's keys and values of the whole prompt exist at a time.

    Tokens are padded to one of a few widths (padding.py), each of which compiles once. The results
    do not depend on how you padded. Inside your own jit the shape is kept.

    Raises ValueError if tokens do not fit the vocabulary or the capacity, or the model was prepared
    for another cache.
    """
    unpadded = int32("tokens", tokens)
    tokens, lengths = checked_tokens(llama, cache, unpadded, lengths)
    if logits not in ("last", "all"):
        raise ValueError(f'{logits=} must be "last" or "all"')
    values, cache = read_prompt(
        llama, cache, tokens, lengths, all_logits=logits == "all", implementation=implementation
    )
    return (resized(values, unpadded.shape[1], fill=np.nan) if logits == "all" else values), cache


def decode_step(
    llama: Llama | FlatLlama,
    cache: Cache,
    token: Int[Array, "B"] | Int[Array, "B T"],
    active: Bool[Array, "B"] | None = None,
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "..."], Cache]:
    """Add generated tokens to a cache and return (logits, cache).

    Args:
        llama: the model, prepared for the cache's spec. In a loop give your jitted step a
            `FlatLlama`, which it need not take apart for every token.
        cache: for B rows.
        token: [B] or [B, T] integers. T tokens give the results of T single steps.
        active: [B] bool, default all True. Other rows are not written, do not count, and get nan.
        implementation: (static) the one that reads and writes the packed cache: "xla", "pallas",
            "native", or None for kernels if they can run.

    Logits are fp32, [B, V] or [B, T, V]. Tokens past the capacity are not written and get nan.

    Raises ValueError, with the reason, if a named implementation cannot run, for tokens of another
    shape, and for a cache of another model or of one layer.
    """
    model = llama.llama() if isinstance(llama, FlatLlama) else llama
    check_dims(model, cache)
    parameters = parameters_for(model, cache.spec)
    token = jnp.asarray(int32("token", token))
    if token.ndim not in (1, 2) or token.shape[0] != cache.batch or not token.size:
        raise ValueError(
            f"token must be [batch] or [batch, T] with batch {cache.batch}, got shape {token.shape}"
        )
    with crossing(cache.placement) as mesh:
        model, cache, token, active = mesh.taken((model, cache, token, active))
        tokens = token if token.ndim == 2 else token[:, None]
        lengths = None if active is None else jnp.where(active, tokens.shape[1], 0)
        step = begin(
            cache,
            tokens.shape[1],
            lengths,
            prefill=False,
            parameters=parameters,
            implementation=implementation,
        )
        hidden, cache = run_layers(model, step, tokens)
        logits = jnp.where(step.valid[..., None], model.logits(hidden), jnp.nan)
        return (logits if token.ndim == 2 else logits[:, 0]), cache


def implementations(cache: Cache, implementation: Implementation = None) -> tuple[str, ...]:
    """Return the implementation that reads each layer in a decode step of one token: "xla",
    "pallas" or "native". Raise ValueError if a named implementation cannot run."""
    heads = cache.dims.num_attention_heads
    return tuple(dispatch.choose(implementation, plan, heads, 1).name for plan in cache.plans)


def obstacles(cache: Cache) -> tuple[str | None, ...]:
    """Return, for each layer, the reason why no kernel for this device reads it in a decode step of
    one token, or None if one does."""
    return tuple(
        dispatch.obstacle(None, plan, cache.dims.num_attention_heads, 1) for plan in cache.plans
    )


def score(
    llama: Llama, cache: Cache, tokens: Integers, lengths: Integers | None = None
) -> tuple[Float[Array, "B T"], Cache]:
    """Return (log-probabilities, cache): entry t is log p(token t | the cache and tokens before t),
    as decoding one token at a time would give it.

    Args:
        llama: the model, prepared for the cache's spec.
        cache: for B rows; its buffers are consumed.
        tokens: [B, T] integers, right-padded.
        lengths: [B] integers, new tokens of each row (default: T).

    Log-probabilities are [B, T] fp32. Each row's first token is only read, so entry 0 is 0. Entries
    at padding are 0 too. [B, T, V] logits never exist at once. Raises as `prefill`.
    """
    unpadded = int32("tokens", tokens)
    tokens, lengths = checked_tokens(llama, cache, unpadded, lengths)
    logprobs, cache = score_program(llama, cache, tokens, lengths)
    return resized(logprobs, unpadded.shape[1]), cache


@functools.partial(jax.jit, donate_argnames="cache")
def score_program(llama: Llama, cache: Cache, tokens: Array, lengths: Array) -> tuple[Array, Cache]:
    """Run the compiled part of `score` without its checks."""
    with crossing(cache.placement) as mesh:
        llama, cache, tokens, lengths = mesh.taken((llama, cache, tokens, lengths))
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        logprobs, cache = decode_scan(
            llama,
            cache,
            tokens,
            lengths,
            (following,),
            _logprobs,
            min(SCORE_CHUNK, tokens.shape[1]),
        )
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return (
            jnp.pad(jnp.where(index + 1 < lengths[:, None], logprobs, 0)[:, :-1], ((0, 0), (1, 0))),
            cache,
        )


def _logprobs(logits: Float[Array, "B T V"], following: Int[Array, "B T"]) -> Float[Array, "B T"]:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logprobs, following[..., None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnames=("reduce", "step"), donate_argnames="cache")
def decode_scan(
    llama: Llama,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: LengthsB,
    beside: tuple[Array, ...],
    reduce: Callable[..., Any],
    step: int,
) -> tuple[Any, Cache]:
    """Decode given tokens, `step` at a time, as `decode_step` would. Return (terms, cache).

    terms: reduce(logits [B, step, V], *slices of `beside` [B, step, ...]) gives arrays, or trees of
    arrays, [B, step]. They are joined to [B, T], so [B, T, V] logits never exist. Rows have lengths
    [B] of tokens. Logits past them and past the capacity are nan, and nothing is written there.
    """
    with crossing(cache.placement) as mesh:
        llama, cache, tokens, lengths, beside = mesh.taken((llama, cache, tokens, lengths, beside))
        rows, length = tokens.shape
        steps = -(-length // step)
        parameters = parameters_for(llama, cache.spec)
        padded = [
            jnp.pad(a, ((0, 0), (0, steps * step - length), *((0, 0),) * (a.ndim - 2)))
            for a in (tokens, *beside)
        ]

        def one_step(cache: Cache, i: Array) -> tuple[Cache, Any]:
            now, *others = (lax.dynamic_slice_in_dim(a, i * step, step, axis=1) for a in padded)
            begun = begin(cache, step, lengths - i * step, prefill=False, parameters=parameters)
            hidden, cache = run_layers(llama, begun, now)
            logits = jnp.where(begun.valid[..., None], llama.logits(hidden), jnp.nan)
            return cache, reduce(logits, *others)

        def joined(term: Array) -> Array:
            return jnp.moveaxis(term, 0, 1).reshape(rows, -1)[:, :length]

        cache, terms = lax.scan(one_step, cache, jnp.arange(steps, dtype=jnp.int32))
        return jax.tree.map(joined, terms), cache
