"""Sampling of the next token."""

from __future__ import annotations

import dataclasses
import reprlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_TEMPERATURE = 3.4e38  # of float32; JSON has integers that no float holds


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The rule by which a token is drawn. Static and hashable. The default is greedy.

    Args:
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_k: keep the so many most probable tokens; 0 keeps all.
        top_p: then keep the fewest tokens whose probabilities add up to it.
        min_p: then keep tokens at least so many times as probable as the best.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def check(self) -> None:
        """Raise ValueError, in one line, if a value is out of range."""
        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            raise ValueError(
                f"temperature={reprlib.repr(self.temperature)} must be at least 0 (0 is greedy) and"
                " finite"
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k={reprlib.repr(self.top_k)} must be at least 0 (0 keeps all tokens) and"
                " below 2**31"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1]")


def best_token(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the first of the most probable tokens, and any token if a logit is nan.

    As `argmax` does, in a fourth of its time on a CPU, which finds no place of a maximum with
    vectors: 0.35 ms in place of 1.39 for 8 rows of 49,152.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    last = logits.shape[-1] - 1
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == best, places, last), axis=-1)


def filter_logits(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Return logits divided by the temperature, with -inf for tokens that top_k, top_p and min_p
    exclude. The best always stays."""
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1:
        order = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        least = jnp.min(jnp.where(before < sampling.top_p, order, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.min_p:
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= best + jnp.log(sampling.min_p), logits, -jnp.inf)
    return logits


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, key: Array, step: Int[Array, ""]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return (token [B] int32, its log-probability [B] under the unfiltered softmax). Row b at step
    s draws with its own key, so a seed fixes the text."""
    if sampling.temperature == 0:
        token = best_token(logits)
    else:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
        token = jax.vmap(jax.random.categorical)(keys, filter_logits(logits, sampling))
    token = token.astype(jnp.int32)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
