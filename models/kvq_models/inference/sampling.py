"""Sampling of the next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from kvq_models.llama.sampling_rule import Sampling as Sampling

SIGN = np.uint32(1 << 31)  # the bit of the sign of a float32
MIN_TEMPERATURE = 1e-30  # dividing logits by less overflows float32


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
    logits = logits / max(sampling.temperature, MIN_TEMPERATURE)
    minimum = jnp.full(len(logits), -jnp.inf)
    if sampling.top_k:
        minimum = min_of_count(logits, jnp.full(len(logits), sampling.top_k))
    if sampling.top_p < 1:
        minimum = min_of_mass(logits, minimum, jnp.full(len(logits), sampling.top_p))
    if sampling.min_p:
        minimum = jnp.maximum(minimum, jnp.max(logits, axis=-1) + jnp.log(sampling.min_p))
    return jnp.where(logits >= minimum[:, None], logits, -jnp.inf)


def min_of_count(logits: Float[Array, "B V"], count: Int[Array, "B"]) -> Float[Array, "B"]:
    """Return the smallest logit that top_k keeps in each row: its largest number `count`, or -inf
    if it has fewer."""
    return _minimum(logits, jnp.ones_like(logits), count.astype(jnp.float32))


def min_of_mass(
    logits: Float[Array, "B V"], minimum: Float[Array, "B"], mass: Float[Array, "B"]
) -> Float[Array, "B"]:
    """Return the smallest logit that top_p keeps in each row, of those from `minimum` on: more
    probable tokens have less than `mass` of the probability."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(logits >= minimum[:, None], jnp.exp(logits - best), 0)
    return _minimum(logits, weights, mass * jnp.sum(weights, axis=-1))


def _minimum(
    logits: Float[Array, "B V"], weights: Float[Array, "B V"], target: Float[Array, "B"]
) -> Float[Array, "B"]:
    """Return the largest x of each row with sum(weights[logits >= x]) >= target, or -inf.

    By bisection over the bits of fp32, in 32 sums: XLA sorts 8 rows of 49,152 in 63 ms on a CPU,
    more than four steps of a small model take, and this takes 1.3.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = high - (high - low) // 2  # above low until they meet
        above = logits >= _float_of(middle)[:, None]
        enough = jnp.sum(jnp.where(above, weights, 0), axis=-1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    bounds = jnp.full(len(logits), -jnp.inf), jnp.max(logits, axis=-1)
    return _float_of(jax.lax.fori_loop(0, 32, halve, jax.tree.map(_order_of, bounds))[0])


def _order_of(x: Float[Array, "B"]) -> UInt32[Array, "B"]:
    """Return integers that are in the order of the numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | SIGN)


def _float_of(order: UInt32[Array, "B"]) -> Float[Array, "B"]:
    bits = jnp.where(order >> 31 == 1, order ^ SIGN, ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def random_token(logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """Return what `jax.random.categorical` draws with each row's key. It finds the place of the
    maximum as `best_token` does, in a third of the time."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return best_token(noise + logits)


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
        token = random_token(filter_logits(logits, sampling), keys)
    token = token.astype(jnp.int32)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
