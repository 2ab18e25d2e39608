"""Sampling with a separate rule for each row of a batch. The rules are arrays: requests come and
go, and the program stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from kvq_jax.types.pytree import pytree
from kvq_models.inference.sampling import (
    MIN_TEMPERATURE,
    Sampling,
    best_token,
    min_of_count,
    min_of_mass,
    random_token,
)

Given = Array | np.ndarray

MAX_ALTERNATIVES = 20  # probable tokens that can be reported besides the drawn one


@pytree
@dataclasses.dataclass(frozen=True)
class RowRules:
    """`Sampling` (sampling.py) and the place in its stream of random numbers, for each row of a
    batch.

    A row draws its token number `step` with fold_in(fold_in(key(seed), choice), step), like row
    `choice` of `generate` with the key of this seed. `alternatives` is True if the most probable
    tokens are wanted too.
    """

    temperature: Float32[Given, "B"]
    top_k: Int32[Given, "B"]
    top_p: Float32[Given, "B"]
    min_p: Float32[Given, "B"]
    seed: UInt32[Given, "B"]
    choice: Int32[Given, "B"]
    step: Int32[Given, "B"]
    alternatives: Bool[Given, "B"]


class RowRule(NamedTuple):
    """One row of `RowRules`."""

    sampling: Sampling = Sampling()
    seed: int = 0
    choice: int = 0
    step: int = 0
    alternatives: bool = False


def row_rules(rows: Iterable[RowRule]) -> RowRules:
    """Return the rules of rows as NumPy arrays, so that nothing is compiled."""
    rows = tuple(rows)
    return RowRules(
        temperature=np.array([row.sampling.temperature for row in rows], np.float32),
        top_k=np.array([row.sampling.top_k for row in rows], np.int32),
        top_p=np.array([row.sampling.top_p for row in rows], np.float32),
        min_p=np.array([row.sampling.min_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint32),
        choice=np.array([row.choice for row in rows], np.int32),
        step=np.array([row.step for row in rows], np.int32),
        alternatives=np.array([row.alternatives for row in rows], bool),
    )


@pytree
@dataclasses.dataclass(frozen=True)
class Drawn:
    """A token for each row.

    token            [B] int32
    logprob          [B] fp32, of the token under the model's unfiltered softmax
    finite           [B] bool; False if the row's logits have nan or inf, and its token means
                     nothing
    likely           [B, A] int32, the most probable tokens, the best first; zeros if no row
                     asked for them
    likely_logprobs  [B, A] fp32, theirs
    """

    token: Int[Given, "B"]
    logprob: Float[Given, "B"]
    finite: Bool[Given, "B"]
    likely: Int[Given, "B A"]
    likely_logprobs: Float[Given, "B A"]


def draw(
    logits: Float[Array, "B V"], rules: RowRules, shifted: Float[Array, "B V"] | None = None
) -> Drawn:
    """Draw a token for each row by its own rule, as `sample` would with the same rule, seed, row
    and step. With `shifted`, draw from these logits. Log-probabilities stay those of `logits`.

    A row's result depends on that row alone, bit for bit. Searching the vocabulary, drawing random
    numbers and finding alternatives are skipped if no row needs them.
    """
    samples = rules.temperature > 0
    asked = logits if shifted is None else shifted
    best = best_token(asked)
    token = lax.cond(
        jnp.any(samples), lambda: jnp.where(samples, _random(asked, rules), best), lambda: best
    )
    total = jax.nn.logsumexp(logits, axis=-1)
    logprob = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total
    likely, values = most_likely(logits, jnp.any(rules.alternatives))
    return Drawn(
        token, logprob, jnp.all(jnp.isfinite(logits), axis=-1), likely, values - total[:, None]
    )


def most_likely(
    logits: Float[Array, "*rows V"], wanted: Bool[Array, ""]
) -> tuple[Int[Array, "*rows A"], Float[Array, "*rows A"]]:
    """Return the most probable tokens and their logits, the best first, or zeros if they are not
    `wanted`."""
    count = min(MAX_ALTERNATIVES, logits.shape[-1])

    def nothing() -> tuple[Array, Array]:
        shape = (*logits.shape[:-1], count)
        return jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32)

    values, tokens = lax.cond(wanted, lambda: tuple(lax.top_k(logits, count)), nothing)
    return tokens, values


def filter_rows(logits: Float[Array, "B V"], rules: RowRules) -> Float[Array, "B V"]:
    """Apply `filter_logits` to each row by its own rule. Rows of temperature 0 count as temperature
    1."""
    samples = rules.temperature > 0
    temperature = jnp.maximum(rules.temperature, MIN_TEMPERATURE)
    logits = logits / jnp.where(samples, temperature, 1)[:, None]
    counts, sums = samples & (rules.top_k > 0), samples & (rules.top_p < 1)
    minimum = jnp.full(len(logits), -jnp.inf)
    minimum = lax.cond(
        jnp.any(counts),
        lambda: jnp.where(counts, min_of_count(logits, jnp.asarray(rules.top_k)), minimum),
        lambda: minimum,
    )
    minimum = lax.cond(
        jnp.any(sums),
        lambda: jnp.where(sums, min_of_mass(logits, minimum, jnp.asarray(rules.top_p)), minimum),
        lambda: minimum,
    )
    # log(0) is -inf: no bound
    minimum = jnp.maximum(minimum, jnp.max(logits, axis=-1) + jnp.log(rules.min_p))
    return jnp.where(logits >= minimum[:, None], logits, -jnp.inf)


def _random(logits: Float[Array, "B V"], rules: RowRules) -> Int[Array, "B"]:
    def key_of(seed: Given, choice: Given, step: Given) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), step)

    keys = jax.vmap(key_of)(rules.seed, rules.choice, rules.step)
    return random_token(filter_rows(logits, rules), keys)
