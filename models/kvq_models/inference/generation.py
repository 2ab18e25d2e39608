"""Generate text: prefill a prompt, then sample and `decode_step` in a compiled loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache import display
from kvq_jax.cache.cache import Cache, check_cache
from kvq_jax.placement.crossing import crossing
from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import positive
from kvq_jax.types.pytree import pytree
from kvq_models.inference.checked_input import checked_tokens
from kvq_models.inference.decoding import decode_step, implementations
from kvq_models.inference.padding import bucket, resized
from kvq_models.inference.prompts import read_prompt
from kvq_models.inference.sampling import Sampling, sample
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama

STREAM_STEPS = 8  # tokens in a segment of a stream


@pytree
@dataclasses.dataclass(frozen=True)
class Generated:
    """Generated tokens and the cache that holds them.

    tokens    [B, max_new_tokens] int32; the first `lengths` of a row count, its end-of-sequence
              token included, and the rest are 0
    lengths   [B] int32
    cache     holds the prompt and every token that counts, ready for the next turn
    logprobs  [B, max_new_tokens] fp32, under the model's unfiltered softmax
    finite    [B] bool; False if a token was drawn from logits with nan or inf: the row
              means nothing from there on. If a cache's dtype is too small for its rows,
              `kvq_jax.size.overflowed(cache)` names them
    """

    tokens: Int[Array, "B new"]
    lengths: Int[Array, "B"]
    cache: Cache
    logprobs: Float[Array, "B new"]
    finite: Bool[Array, "B"]

    def rows(self) -> list[list[int]]:
        """Return the tokens of each row that count."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
        return [row[:count].tolist() for row, count in zip(tokens, lengths, strict=True)]

    def __repr__(self) -> str:
        return display.line("Generated", self._facts())

    def _repr_html_(self) -> str:
        return display.table("Generated", self._facts())

    def _facts(self) -> dict[str, object]:
        return {
            "tokens": display.values(self.lengths),
            "of at most": self.tokens.shape[-1],
            "cache": self.cache,
        }


@pytree
@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """The choices of one generation, as in `generate`. A pytree: a compiled loop depends on the
    static fields and takes the others as arguments."""

    max_new_tokens: int
    key: Array
    sampling: Sampling = dataclasses.field(default=Sampling(), metadata={"static": True})
    eos_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    implementation: Implementation = dataclasses.field(default=None, metadata={"static": True})


def generation_settings(
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    eos_ids: Sequence[int] = (),
    key: Array | None = None,
    implementation: Implementation = None,
) -> GenerationSettings:
    """Return settings, with key(0) by default. Raise ValueError, in one line, for a number of
    tokens below 1, and for sampling or a key of another type."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a kvq_models.Sampling, got {type(sampling).__name__}")
    key = jax.random.key(0) if key is None else key
    # old keys are two or four words
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if np.ndim(key) != (0 if typed else 1):
        raise ValueError(f"key must be one key, such as jax.random.key(0), got {_shown(key)}")
    maximum = positive("max_new_tokens", max_new_tokens)
    return GenerationSettings(maximum, key, sampling, tuple(eos_ids), implementation)


def _shown(key: Any) -> str:
    return f"an array {list(key.shape)}" if np.ndim(key) else type(key).__name__


@pytree
@dataclasses.dataclass(frozen=True)
class GenerationState:
    """The state of the loop: the next logits, the tokens so far, and the rows that have ended. W is
    at least max_new_tokens (padding.py)."""

    cache: Cache
    logits: Float[Array, "B V"]
    tokens: Int[Array, "B W"]
    logprobs: Float[Array, "B W"]
    lengths: Int[Array, "B"]
    ended: Bool[Array, "B"]
    step: Int[Array, ""]
    finite: Bool[Array, "B"]


def generate(
    llama: Llama,
    cache: Cache,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    eos_ids: tuple[int, ...] = (),
    key: Array | None = None,
    implementation: Implementation = None,
) -> Generated:
    """Continue prompts by up to max_new_tokens each. The compiled loop stops when every row has met
    one of `eos_ids`.

    Args:
        llama: the model, prepared for the cache's spec.
        cache: for B rows; its buffers are consumed. Continue with the result's `.cache`.
        tokens: [B, T] integers, right-padded prompts of at least one token.
        lengths: [B] integers, tokens of each prompt (default: T).
        max_new_tokens: the most tokens to generate for a row.
        sampling: the rule by which tokens are drawn (default: greedy).
        eos_ids: tokens that end a row. The cache of a row that has ended does not change.
        key: a JAX key (default: key(0)). The same key gives the same tokens.
        implementation: see `decode_step`.

    Raises ValueError, before any work, if prompt and new tokens exceed the capacity, a prompt is
    empty, a token is not in the vocabulary, the cache is none of `init_cache`, or a named
    implementation cannot run.
    """
    settings = generation_settings(max_new_tokens, sampling, eos_ids, key, implementation)
    state = start(llama, cache, tokens, lengths, settings)
    state = advance(FlatLlama(llama), state, settings, jnp.int32(settings.max_new_tokens))
    return generated(state, settings.max_new_tokens)


def generate_stream(
    llama: Llama,
    cache: Cache,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    eos_ids: tuple[int, ...] = (),
    key: Array | None = None,
    implementation: Implementation = None,
) -> Iterator[Generated]:
    """Read prompts, and return an iterator over all tokens so far, which adds a few at each turn.

    Takes the arguments of `generate`, raises as it does when it is called, and gives the same
    tokens. Each cache is consumed by the next turn: keep only the last one.
    """
    settings = generation_settings(max_new_tokens, sampling, eos_ids, key, implementation)
    return stream(llama, start(llama, cache, tokens, lengths, settings), settings)


def stream(
    llama: Llama, state: GenerationState, settings: GenerationSettings
) -> Iterator[Generated]:
    """Continue from the loop's first state (`begun`) as `generate_stream` does."""
    model = FlatLlama(llama)
    maximum, until = settings.max_new_tokens, 0
    while until < maximum and not np.asarray(state.ended).all():
        until = min(until + STREAM_STEPS, maximum)
        state = advance(model, state, settings, jnp.int32(until))
        yield generated(state, maximum)


def generated(state: GenerationState, max_new_tokens: int) -> Generated:
    """Return the result of a state, without the columns that only round its width up."""
    return Generated(
        resized(state.tokens, max_new_tokens),
        state.lengths,
        state.cache,
        resized(state.logprobs, max_new_tokens),
        state.finite,
    )


def start(
    llama: Llama,
    cache: Cache,
    tokens: Integers,
    lengths: Integers | None,
    settings: GenerationSettings,
) -> GenerationState:
    """Check a request, add its prompts to the cache, and return the loop's first state. Raises as
    `generate` does."""
    max_new_tokens, implementation = settings.max_new_tokens, settings.implementation
    settings.sampling.check()
    check_cache(cache)
    implementations(cache, implementation)
    tokens, lengths = checked_tokens(llama, cache, tokens, lengths, new_tokens=max_new_tokens)
    if not isinstance(lengths, Tracer) and np.asarray(lengths).min() < 1:
        raise ValueError(
            f"row {np.asarray(lengths).argmin()} has an empty prompt; give at least one token"
        )
    logits, cache = read_prompt(llama, cache, tokens, lengths, implementation=implementation)
    return begun(cache, logits, max_new_tokens)


def begun(cache: Cache, logits: Float[Array, "B V"], max_new_tokens: int) -> GenerationState:
    """Return the loop's first state, from a cache that holds the prompts and the logits after
    them."""
    batch, width = cache.batch, bucket(max_new_tokens)
    # where the loop leaves them: arrays that start elsewhere would need another program for the
    # first segment
    everywhere = None if cache.placement is None else cache.placement.everywhere
    return GenerationState(cache, logits, *begun_counters(batch, width, everywhere))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def begun_counters(batch: int, width: int, everywhere: NamedSharding | None) -> tuple[Array, ...]:
    """Return what a state holds beside cache and logits before the first token."""
    counters = (
        jnp.zeros((batch, width), jnp.int32),
        jnp.zeros((batch, width), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), bool),
        jnp.zeros((), jnp.int32),
        jnp.ones((batch,), bool),
    )
    if everywhere is None:
        return counters
    return lax.with_sharding_constraint(counters, everywhere)


@functools.partial(jax.jit, donate_argnames="state")
def advance(
    model: FlatLlama, state: GenerationState, settings: GenerationSettings, until: Int[Array, ""]
) -> GenerationState:
    """Generate until `until` tokens exist or every row has ended. One program serves `generate`,
    its stream and ahead-of-time compilation."""
    with crossing(state.cache.placement) as mesh:
        model, state, settings, until = mesh.taken((model, state, settings, until))
        return _loop(model.llama(), state, settings, until)


def _loop(
    llama: Llama, state: GenerationState, settings: GenerationSettings, until: Int[Array, ""]
) -> GenerationState:
    def go_on(now: GenerationState) -> Array:
        return (now.step < until) & ~jnp.all(now.ended)

    def one_step(now: GenerationState) -> GenerationState:
        active = ~now.ended
        token, logprob = sample(now.logits, settings.sampling, settings.key, now.step)
        token, logprob = jnp.where(active, token, 0), jnp.where(active, logprob, 0)
        logits, cache = decode_step(
            llama, now.cache, token, active, implementation=settings.implementation
        )
        return GenerationState(
            cache,
            logits,
            lax.dynamic_update_slice_in_dim(now.tokens, token[:, None], now.step, axis=1),
            lax.dynamic_update_slice_in_dim(now.logprobs, logprob[:, None], now.step, axis=1),
            now.lengths + active.astype(jnp.int32),
            now.ended | jnp.isin(token, jnp.array(settings.eos_ids, jnp.int32)),
            now.step + 1,
            now.finite & (~active | jnp.all(jnp.isfinite(now.logits), axis=-1)),
        )

    last = lax.while_loop(go_on, one_step, state)
    if last.cache.placement is None:
        return last
    # every host reads these
    results = (last.tokens, last.logprobs, last.lengths, last.ended, last.step, last.finite)
    return GenerationState(
        last.cache,
        last.logits,
        *lax.with_sharding_constraint(results, last.cache.placement.everywhere),
    )
