"""The compiled programs of an engine: one steps all slots, one fills a slot, and one per width
prefills."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache, init_cache
from kvq_jax.cache.row_operations import replace_row
from kvq_jax.placement.placement import Placement
from kvq_jax.types.pytree import pytree
from kvq_models.inference.decoding import decode_step
from kvq_models.inference.engine.requests import MAX_BIASED
from kvq_models.inference.layer_by_layer import NewLengths, NewTokens
from kvq_models.inference.prompts import read_hidden
from kvq_models.inference.row_sampling import Drawn, Given, RowRules, draw, most_likely
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import HiddenBTD, Llama

STEPS = 8  # most steps in one call
SCORED = 32  # prompt tokens whose logits exist at a time

Offsets: TypeAlias = Float[Array, "B V"]  # what requests add to the logits of their slots


def no_offsets(slots: int, vocabulary: int, placement: Placement | None) -> Offsets:
    everywhere = None if placement is None else placement.everywhere
    return jax.device_put(np.zeros((slots, vocabulary), np.float32), everywhere)


def padded_bias(bias: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens [MAX_BIASED] int32, what to add to their logits, fp32)."""
    tokens, values = np.zeros(MAX_BIASED, np.int32), np.zeros(MAX_BIASED, np.float32)
    for i, (token, value) in enumerate(bias):
        tokens[i], values[i] = token, value
    return tokens, values


def _constrained(offsets: Offsets, placement: Placement | None) -> Offsets:
    if placement is None:
        return offsets
    return lax.with_sharding_constraint(offsets, placement.everywhere)


@pytree
@dataclasses.dataclass(frozen=True)
class SlotInputs:
    """Arrays that the steps of a call take from the requests in the slots.

    tokens     [B] int32, the newest token of each
    active     [B] bool, True for slots with a request
    penalties  [B] fp32, subtracted from the logits of the added tokens from now on
    biased     [] bool, True if a slot has offsets; otherwise they cost nothing
    rules      of the next tokens
    """

    tokens: Int[Given, "B"]
    active: Bool[Given, "B"]
    penalties: Float[Given, "B"]
    biased: Bool[Given, ""]
    rules: RowRules


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames=("cache", "offsets"))
def step_slots(
    model: FlatLlama,
    cache: Cache,
    offsets: Offsets,
    slots: SlotInputs,
    count: Int[Array, ""],
    implementation: Implementation = None,
) -> tuple[Drawn, Cache, Offsets]:
    """Take `count` steps of every active slot, at most STEPS. Each adds a token, the given one
    first, and draws the next. Other slots become empty. Return (what each step drew, with an axis
    of STEPS before the others; the slots; the offsets)."""
    llama, active, rules = model.llama(), jnp.asarray(slots.active), slots.rules
    # vacant rows cost attention nothing
    cache = dataclasses.replace(cache, lengths=jnp.where(active, cache.lengths, 0))
    rows = jnp.arange(cache.batch)

    def one_step(i: Array, state: tuple[Array, Cache, Offsets, Drawn]) -> tuple:
        tokens, cache, offsets, drawn = state
        logits, cache = decode_step(llama, cache, tokens, active, implementation=implementation)
        offsets, shifted = lax.cond(
            slots.biased,
            lambda: ((new := offsets.at[rows, tokens].add(-slots.penalties)), logits + new),
            lambda: (offsets, logits),
        )
        new = draw(logits, dataclasses.replace(rules, step=rules.step + i), shifted)
        drawn = jax.tree.map(lambda all_steps, this: all_steps.at[i].set(this), drawn, new)
        return new.token, cache, offsets, drawn

    nothing = jax.tree.map(
        lambda value: jnp.zeros((STEPS, *value.shape), value.dtype),
        jax.eval_shape(draw, offsets, rules),
    )
    begun = slots.tokens, cache, offsets, nothing
    _, cache, offsets, drawn = lax.fori_loop(0, count, one_step, begun)
    return drawn, cache, _constrained(offsets, cache.placement)


@functools.partial(jax.jit, donate_argnames=("cache", "row", "offsets"))
def fill_slot(
    cache: Cache,
    row: Cache,
    offsets: Offsets,
    slot: Int[Array, ""],
    logits: Float[Array, "1 V"],
    bias: tuple[Int[Array, "P"], Float[Array, "P"]],
    rules: RowRules,
) -> tuple[Drawn, Cache, Cache, Offsets]:
    """Put a prefilled row into a slot and draw its first token. Return (the token, the slots, an
    empty row in the old row's buffers, the offsets with `bias` in the slot)."""
    empty = init_cache(row.spec, row.dims, 1, row.capacity, row.dtype, row.placement)
    new = jnp.zeros(offsets.shape[1], jnp.float32).at[bias[0]].add(bias[1])
    offsets = _constrained(offsets.at[slot].set(new), cache.placement)
    return draw(logits, rules, logits + new[None]), replace_row(cache, slot, row), empty, offsets


def score_chunk(
    llama: Llama,
    row: Cache,
    tokens: NewTokens,
    lengths: NewLengths,
    following: NewTokens,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "1 V"], tuple[Float[Array, "T"], Int[Array, "T A"], Float[Array, "T A"]], Cache
]:
    """Do what `read_prompt` does, and return log p of the token that follows each one, with the
    most probable tokens there.

    Attention inside the chunk is exact, as in any prefill. [T, V] logits never exist at once.
    """
    hidden, row = read_hidden(llama, row, tokens, lengths, implementation)
    return *_scores(llama, hidden, lengths, following), row


@jax.jit
def _scores(
    llama: Llama, hidden: HiddenBTD, lengths: Int[Array, "1"], following: Int[Array, "1 T"]
) -> tuple[Float[Array, "1 V"], tuple[Float[Array, "T"], Int[Array, "T A"], Float[Array, "T A"]]]:
    """Return the last token's logits and the scores of `score_chunk`."""
    width = hidden.shape[1]
    parts = -(-width // SCORED)
    padded = jnp.pad(hidden[0], ((0, parts * SCORED - width), (0, 0)))
    asked = jnp.pad(following[0], (0, parts * SCORED - width))

    def score_part(part: Array) -> tuple[Array, Array, Array]:
        logits = llama.logits(lax.dynamic_slice_in_dim(padded, part * SCORED, SCORED)[None])[0]
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        following_part = lax.dynamic_slice_in_dim(asked, part * SCORED, SCORED)
        likely, values = most_likely(logprobs, jnp.bool_(True))
        return jnp.take_along_axis(logprobs, following_part[:, None], axis=-1)[:, 0], likely, values

    following_logprobs, likely, values = (
        a.reshape(parts * SCORED, *a.shape[2:])[:width]
        for a in lax.map(score_part, jnp.arange(parts, dtype=jnp.int32))
    )
    last = llama.logits(
        jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
    )[:, 0]
    return last, (following_logprobs, likely, values)
