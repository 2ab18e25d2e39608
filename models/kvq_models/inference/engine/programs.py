"""The compiled programs of an engine: one steps all slots, one fills a slot, and one per width
prefills."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache, init_cache
from kvq_jax.cache.row_operations import replace_row
from kvq_jax.cache.step import begin
from kvq_models.inference.decoding import decode_step, prefill_program
from kvq_models.inference.layers import run_layers
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.row_sampling import Drawn, RowRules, draw, most_likely
from kvq_models.llama.model import Llama

SCORED = 32  # prompt tokens whose logits exist at a time

prefill_chunk = prefill_program


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def step_slots(
    llama: Llama,
    cache: Cache,
    tokens: Int[Array, "B"],
    active: Bool[Array, "B"],
    rules: RowRules,
    implementation: Implementation = None,
) -> tuple[Drawn, Cache]:
    """Add one token to every active slot and draw the next ones. Other slots become empty."""
    # vacant rows cost attention nothing
    cache = dataclasses.replace(cache, lengths=jnp.where(active, cache.lengths, 0))
    logits, cache = decode_step(llama, cache, tokens, active, implementation=implementation)
    return draw(logits, rules), cache


@functools.partial(jax.jit, donate_argnames=("cache", "row"))
def fill_slot(
    cache: Cache, row: Cache, slot: Int[Array, ""], logits: Float[Array, "1 V"], rules: RowRules
) -> tuple[Drawn, Cache, Cache]:
    """Put a prefilled row into a slot and draw its first token. Return (the token, the slots, an
    empty row in the old row's buffers)."""
    empty = init_cache(row.spec, row.dims, 1, row.capacity, row.dtype, row.placement)
    return draw(logits, rules), replace_row(cache, slot, row), empty


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="row")
def score_chunk(
    llama: Llama,
    row: Cache,
    tokens: Int[Array, "1 T"],
    lengths: Int[Array, "1"],
    following: Int[Array, "1 T"],
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "1 V"], tuple[Float[Array, "T"], Int[Array, "T A"], Float[Array, "T A"]], Cache
]:
    """Do what `prefill_chunk` does, and return log p of the token that follows each one, with the
    most probable tokens there.

    Attention inside the chunk is exact, as in any prefill. [T, V] logits never exist at once.
    """
    step = begin(
        row,
        tokens.shape[1],
        lengths,
        prefill=True,
        parameters=parameters_for(llama, row.spec),
        implementation=implementation,
    )
    hidden, row = run_layers(llama, step, tokens)
    width = tokens.shape[1]
    parts = -(-width // SCORED)
    padded = jnp.pad(hidden[0], ((0, parts * SCORED - width), (0, 0)))
    asked = jnp.pad(following[0], (0, parts * SCORED - width))

    def one(part: Array) -> tuple[Array, Array, Array]:
        logits = llama.logits(lax.dynamic_slice_in_dim(padded, part * SCORED, SCORED)[None])[0]
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        following_part = lax.dynamic_slice_in_dim(asked, part * SCORED, SCORED)
        likely, values = most_likely(logprobs, jnp.bool_(True))
        return jnp.take_along_axis(logprobs, following_part[:, None], axis=-1)[:, 0], likely, values

    following_logprobs, likely, values = (
        a.reshape(parts * SCORED, *a.shape[2:])[:width]
        for a in lax.map(one, jnp.arange(parts, dtype=jnp.int32))
    )
    last = llama.logits(
        jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
    )[:, 0]
    return last, (following_logprobs, likely, values), row
