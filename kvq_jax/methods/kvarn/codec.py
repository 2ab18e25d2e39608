"""KVarN's codec of rows that were rotated already (codecs/rotating.py): tiles of T tokens and H
channels with scales that give all tokens, and all channels, about the same variance.

    repeat ROUNDS times, in logarithms:
        a_j <- a_j * std_i(x_ij / (a_j b_i))          j: tokens of keys, channels of values
        b_i <- b_i * std_j(x_ij / (a_j b_i))          i: channels of keys, tokens of values

A group's codes do not depend on b, which is constant in it, so the tile is quantized as x / a.
Source: Mueller et al., KVarN, arXiv:2606.03458, whose text was not at hand beyond its abstract:
order, rounds, limits and the choice among rounds follow its public code.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvq_jax.codecs.scaled import ScaledCodec

ROUNDS = 16
MIN_STD, MAX_STD = 1e-3, 1e3  # of one correction
MAX_LOG = 10.0  # of a scale
GAIN = 1e-3  # by which a round must be better: rounding does not choose among converged ones
MAX_COARSENING = 2.0  # of the squared steps of a tile: tiles of real models stay below 1.6

Tiles = Float[Array, "B K n T H"]
TOKENS, CHANNELS = 3, 4  # axes of tiles


@dataclasses.dataclass(frozen=True)
class KVarNCodec(ScaledCodec):
    """(code * step + zero) * a.

    tile: the tokens of a tile.
    floor: the least second scale.
    """

    tile: int = 0
    floor: float = 0.0

    def second_scale(self, rows: Float[Array, "B K T H"]) -> Float[Array, "B K S width"]:
        batch, heads, tokens, channels = rows.shape
        over = CHANNELS if self.format.axis == "tokens" else TOKENS
        tiles = rows.reshape(batch, heads, tokens // self.tile, self.tile, channels)
        a = balance(tiles, over, self.floor)
        return a.reshape(batch, heads, tokens // self.share[1], -1)


def balance(tiles: Tiles, over: int, floor: float) -> Float[Array, "B K n a b"]:
    """Return the scales a of tiles, which are constant along the axis `over`, of the round whose
    variances differ least.

    The variances of a tile differ by max / min of its tokens' standard deviations plus that of its
    channels'. No round counts that makes the tile's steps much longer than equal scales do: a
    variance is about its mean, so x / a of a channel in which nearly all tokens agree is far from
    zero, and would widen the range of every token.
    """
    across = TOKENS + CHANNELS - over
    min_log = max(math.log(floor), -MAX_LOG) if floor else -MAX_LOG

    def corrected(log: Array, other: Array, axis: int) -> Array:
        std = jnp.std(tiles * jnp.exp(-log - other), axis, ddof=1, keepdims=True)
        step = jnp.log(jnp.clip(std, MIN_STD, MAX_STD))
        return jnp.clip(log + step, min_log, MAX_LOG)

    def turn(_: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, best_a, minimum = state
        a = corrected(a, b, over)
        b = corrected(b, a, across)
        spread = _spread(tiles * jnp.exp(-a - b))
        better = (spread < (1 - GAIN) * minimum) & (_coarseness(tiles, a, across) <= maximum)
        return a, b, jnp.where(better, a, best_a), jnp.where(better, spread, minimum)

    a, b = (jnp.zeros_like(lax.slice_in_dim(tiles, 0, 1, axis=axis)) for axis in (over, across))
    maximum = MAX_COARSENING * _coarseness(tiles, a, across)
    state = lax.fori_loop(0, ROUNDS, turn, (a, b, a, _spread(tiles)))
    return jnp.exp(state[2])


def _spread(tiles: Tiles) -> Float[Array, "B K n 1 1"]:
    def ratio(axis: int) -> Array:
        std = jnp.std(tiles, axis, ddof=1, keepdims=True)
        minimum = jnp.maximum(jnp.min(std, (TOKENS, CHANNELS), keepdims=True), 1e-8)
        return jnp.max(std, (TOKENS, CHANNELS), keepdims=True) / minimum

    return ratio(TOKENS) + ratio(CHANNELS)


def _coarseness(tiles: Tiles, log: Array, across: int) -> Float[Array, "B K n 1 1"]:
    """Return the sum of squares of a * (max - min of x / a along `across`), to which the squared
    error is proportional."""
    balanced = tiles * jnp.exp(-log)
    span = jnp.max(balanced, across, keepdims=True) - jnp.min(balanced, across, keepdims=True)
    a, span = (jnp.sum(x**2, (TOKENS, CHANNELS), keepdims=True) for x in (jnp.exp(log), span))
    return a * span
