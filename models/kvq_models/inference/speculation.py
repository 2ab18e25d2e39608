"""Prompt-lookup speculation: greedy decoding of several tokens per step, drafted from earlier text
of the same row.

    drafts     the tokens that followed an earlier, the newest, occurrence of the row's last tokens
    step       decode [next token, drafts] at once, T = 1 + drafts
    accepted   the drafts up to the first that is not the most probable token at its place; the
               cache is trimmed to them

The tokens equal those of `generate`, as far as a step of T tokens computes what T steps do. A block
that has aged is quantized, and taking it back would leave its rounding in the window. So nothing is
drafted past the next block's ageing, and `trim` takes back exact rows alone.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache, check_cache
from kvq_jax.cache.row_operations import trim
from kvq_jax.cache.step import begin
from kvq_jax.types.array_types import Integers, LengthsB
from kvq_jax.types.integers import positive
from kvq_jax.types.pytree import pytree
from kvq_models.inference.checked_input import checked_tokens
from kvq_models.inference.generation import (
    Generated,
    GenerationSettings,
    GenerationState,
    generated,
    generation_settings,
    start,
)
from kvq_models.inference.layers import run_layers
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.padding import bucket
from kvq_models.inference.sampling import best_token
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama

# lengths of the text that must have occurred before; the longer one is looked up first
NGRAMS = (3, 2)


@pytree
@dataclasses.dataclass(frozen=True)
class History:
    """The tokens of each row so far, prompt and answer: the first `lengths` of a row count."""

    tokens: Int[Array, "B W"]
    lengths: LengthsB


def generate_drafted(
    llama: Llama,
    cache: Cache,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    drafts: int,
    max_new_tokens: int = 128,
    eos_ids: tuple[int, ...] = (),
    implementation: Implementation = None,
) -> Generated:
    """Generate greedily what `generate` does, with up to `drafts` tokens of each row drafted per
    step.

    Args:
        llama: the model, prepared for the cache's spec.
        cache: for B rows, on one device; its buffers are consumed.
        tokens: [B, T] integers, right-padded prompts of at least one token.
        lengths: [B] integers, tokens of each prompt (default: T).
        drafts: the most tokens to draft for a row in a step, at least 1.
        max_new_tokens: the most tokens to generate for a row.
        eos_ids: tokens that end a row.
        implementation: see `decode_step`.

    Rows advance independently. Raises as `generate` does, and ValueError if `drafts` is less than 1
    or the cache is on a mesh.
    """
    drafts = check(cache, drafts)
    settings = generation_settings(max_new_tokens, eos_ids=eos_ids, implementation=implementation)
    max_new_tokens = settings.max_new_tokens
    tokens, lengths = checked_tokens(llama, cache, tokens, lengths, new_tokens=max_new_tokens)
    state = start(llama, cache, tokens, lengths, settings)
    history = begun_history(tokens, lengths, max_new_tokens)
    model = FlatLlama(llama)
    state, _ = advance(model, state, history, settings, jnp.int32(max_new_tokens), drafts)
    return generated(state, max_new_tokens)


def check(cache: Cache, drafts: int) -> int:
    """Return the number of drafts as an int. Raise ValueError, in one line, if nothing can be
    drafted."""
    check_cache(cache)
    drafts = positive("drafts", drafts)
    if cache.placement is not None:
        raise ValueError(
            "tokens are drafted for caches on one device, and this one lies on a mesh"
            f" ({cache.placement})"
        )
    return drafts


def begun_history(tokens: Int[Array, "B T"], lengths: LengthsB, max_new_tokens: int) -> History:
    return History(jnp.pad(tokens, ((0, 0), (0, bucket(max_new_tokens)))), lengths)


@functools.partial(jax.jit, static_argnames="drafts", donate_argnames="state")
def advance(
    model: FlatLlama,
    state: GenerationState,
    history: History,
    settings: GenerationSettings,
    until: Int[Array, ""],
    drafts: int,
) -> tuple[GenerationState, History]:
    """Generate until every row has `until` tokens or has ended. state.step counts the model's
    steps."""
    llama = model.llama()

    def live(now: GenerationState) -> Bool[Array, "B"]:
        return ~now.ended & (now.lengths < until)

    def one_step(carry: tuple[GenerationState, History]) -> tuple[GenerationState, History]:
        now, history = carry
        first = best_token(now.logits)[:, None]
        known = _added(history, first, live(now)[:, None])
        asked = jnp.concatenate([first, look_up(known, drafts)], axis=1)  # [B, T]
        maximum = 1 + jnp.minimum(until - now.lengths - 1, _room(now.cache))
        count = jnp.where(live(now), jnp.clip(maximum, 1, 1 + drafts), 0)
        step = begin(
            now.cache,
            1 + drafts,
            count,
            prefill=False,
            parameters=parameters_for(llama, now.cache.spec),
            implementation=settings.implementation,
        )
        hidden, cache = run_layers(llama, step, asked)
        logits = llama.logits(hidden)  # [B, T, V]
        ends = jnp.isin(asked, jnp.array(settings.eos_ids, jnp.int32))
        best = best_token(logits[:, :-1])
        right = (asked[:, 1:] == best) & ~ends[:, :-1]
        taken = jnp.concatenate([jnp.ones_like(first, bool), right], axis=1) & (
            jnp.arange(1 + drafts, dtype=jnp.int32)[None] < count[:, None]
        )
        taken = jnp.cumprod(taken, axis=1).astype(bool)
        new = jnp.sum(taken, axis=1, dtype=jnp.int32)
        drawn_from = jnp.concatenate([now.logits[:, None], logits[:, :-1]], axis=1)
        logprobs = jnp.take_along_axis(
            jax.nn.log_softmax(drawn_from, axis=-1), asked[..., None], axis=-1
        )[..., 0]
        last = jnp.take_along_axis(logits, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
        state = GenerationState(
            trim(cache, now.cache.lengths + new, parameters_for(llama, cache.spec)),
            jnp.where(live(now)[:, None], last, now.logits),
            _written(now.tokens, asked, now.lengths, taken),
            _written(now.logprobs, logprobs, now.lengths, taken),
            now.lengths + new,
            now.ended | jnp.any(taken & ends, axis=1),
            now.step + 1,
            now.finite & jnp.all(~taken | jnp.all(jnp.isfinite(drawn_from), axis=-1), axis=1),
        )
        return state, _added(history, asked, taken)

    return lax.while_loop(lambda carry: jnp.any(live(carry[0])), one_step, (state, history))


def look_up(history: History, drafts: int) -> Int[Array, "B drafts"]:
    """Return a draft for each row: the tokens after the newest earlier occurrence of its last
    tokens. If fewer than `drafts` tokens follow, the row repeats itself, and so does the draft.
    Rows without such an occurrence get their last token.
    """
    return jax.vmap(lambda tokens, length: _of_row(tokens, length, drafts))(
        history.tokens, history.lengths
    )


def _of_row(tokens: Int[Array, "W"], length: Int[Array, ""], drafts: int) -> Int[Array, "drafts"]:
    at, begins = jnp.arange(tokens.shape[0], dtype=jnp.int32), length - 1
    for size in reversed(NGRAMS):
        same = jnp.all(
            jnp.stack([jnp.roll(tokens, -i) == tokens[length - size + i] for i in range(size)]),
            axis=0,
        )
        place = jnp.max(jnp.where(same & (at + size < length), at, -1))
        begins = jnp.where(place >= 0, place + size, begins)
    return tokens[begins + jnp.arange(drafts, dtype=jnp.int32) % (length - begins)]


def _room(cache: Cache) -> LengthsB:
    """Return how many tokens each row can take after its next one, and give back: before another
    block is quantized, and before a sliding window loses tokens that the next one sees."""
    after = cache.lengths + 1
    rooms = [cache.capacity - after]
    for plan in cache.plans:
        regions = plan.regions
        if plan.quantizes:
            exact = regions.sink + regions.recent + regions.block - 1
            rooms.append(regions.aged_tokens(after) + exact - after)
        if regions.wraps:
            rooms.append(jnp.full_like(after, regions.slack - 1))
    return functools.reduce(jnp.minimum, rooms)


def _added(history: History, tokens: Int[Array, "B T"], taken: Bool[Array, "B T"]) -> History:
    added = jnp.sum(taken, axis=1, dtype=jnp.int32)
    return History(
        _written(history.tokens, tokens, history.lengths, taken), history.lengths + added
    )


def _written(rows: Array, new: Array, at: LengthsB, taken: Bool[Array, "B T"]) -> Array:
    places = jnp.where(
        taken, at[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None], rows.shape[1]
    )
    return rows.at[jnp.arange(len(rows), dtype=jnp.int32)[:, None], places].set(new, mode="drop")
