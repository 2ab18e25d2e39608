"""OptR's rotations: corrections of a base, learned by gradient descent, of one layer.

    R      = R_0 exp(A - A^T)                        R_0 OSCAR's or Hadamard's rotation, A from 0
    k^     = R round((k - mean) R) R^T,   p = softmax(q (k - mean)),   p^ = softmax(q k^)
    keys   minimize  KL(p || p^) + mean (((p^ - p) v) W_O)^2
    values minimize  mean ((p^ (v^ - v)) W_O)^2,     v^ = R round(v R) R^T, p^ of the learned keys

for each KV head, over its query heads and the last queries of a text, W_O the rows of a query head.
Rounding passes gradients straight through. The sink and the tokens of these queries stay exact, as
a cache keeps them. Adam takes `steps` steps on the first texts. Every 20 steps the others judge:
each head keeps its best rotation, the base included. Source: the public code of OptR.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.rotations import rotation
from kvq_jax.codecs.learning import LayerTrace
from kvq_jax.methods.oscar_spectral.codec import turn_of_moment

TEXTS = 4  # to learn from, and as many to judge, at most
RATE, MOMENTUM, SQUARES, EPSILON = 0.02, 0.9, 0.999, 1e-8  # Adam's
JUDGED = 20  # steps

Turn = Float[Array, "K H H"]


class Rounding(NamedTuple):
    """Codes of `bits` for groups of channels, clipped at the magnitude of rank `kept`."""

    bits: int
    group: int
    kept: float


class Texts(NamedTuple):
    """Sequences of S texts, and what is the same for all."""

    q: Float[Array, "S W K G H"]
    k: Float[Array, "S T K H"]
    v: Float[Array, "S T K H"]
    output: Float[Array, "K G H D"]
    scale: Float[Array, ""]
    sink: Int[Array, ""]


def keys(trace: LayerTrace, rounding: Rounding, base: str, steps: int) -> dict[str, np.ndarray]:
    """Return turn [K, H, H] and mean [K, H] of keys."""
    mean = trace.keys.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    learning, judging = _texts(trace, mean)
    first = _base(base, trace.moments)
    loss = functools.partial(_key_loss, rounding)
    return {"turn": _learned(first, (), learning, judging, loss, steps), "mean": mean}


def values(
    trace: LayerTrace,
    learned: dict[str, np.ndarray],
    of_keys: Rounding,
    rounding: Rounding,
    base: str,
    steps: int,
) -> dict[str, np.ndarray]:
    """Return turn [K, H, H] of values, for keys in their learned rotation."""
    learning, judging = _texts(trace, learned["mean"])
    keys = np.moveaxis(trace.keys, 2, 0).astype(np.float64)
    weights = np.einsum("ksth,khe,kste->kst", keys, trace.moments, keys)
    v = np.moveaxis(trace.values, 2, 0) * weights[..., None]
    v = v.reshape(len(v), -1, v.shape[-1])
    first = _base(base, np.swapaxes(v, 1, 2) @ v / v.shape[1])
    loss = functools.partial(_value_loss, of_keys, rounding)
    turn = jnp.asarray(learned["turn"])
    return {"turn": _learned(first, (turn,), learning, judging, loss, steps)}


def _base(name: str, moment: np.ndarray) -> Float[np.ndarray, "K H H"]:
    if name == "oscar":
        return turn_of_moment(moment)
    return np.broadcast_to(rotation(moment.shape[-1]).T, moment.shape)


def _texts(trace: LayerTrace, mean: np.ndarray) -> tuple[Texts, Texts]:
    """Return the texts to learn from and the others. One text serves as both."""
    count, _, heads, width = trace.keys.shape
    half = min(TEXTS, max(1, count // 2))
    parts = slice(0, half), slice(half, 2 * half) if count > 1 else slice(0, 1)
    output = trace.output.reshape(heads, -1, width, trace.output.shape[-1])
    q = trace.queries.reshape(*trace.queries.shape[:2], heads, -1, width)
    learning, judging = (
        Texts(
            q=jnp.asarray(q[part]),
            k=jnp.asarray(trace.keys[part] - mean),
            v=jnp.asarray(trace.values[part]),
            output=jnp.asarray(output),
            scale=jnp.float32(trace.scale),
            sink=jnp.int32(trace.sink),
        )
        for part in parts
    )
    return learning, judging


def read(rows: Float[Array, "S T K H"], turn: Turn, rounding: Rounding) -> Float[Array, "S T K H"]:
    """Return what rows read as after they are rotated, clipped and rounded."""
    turned = jnp.einsum("stkh,khe->stke", rows, turn, precision=lax.Precision.HIGHEST)
    if rounding.kept:
        index = min(int(rounding.kept * turned.shape[-1]), turned.shape[-1] - 1)
        maximum = lax.stop_gradient(jnp.sort(jnp.abs(turned), axis=-1)[..., index, None])
        turned = jnp.clip(turned, -maximum, maximum)
    groups = turned.reshape(*turned.shape[:-1], -1, rounding.group)
    low, high = (end(groups, axis=-1, keepdims=True) for end in (jnp.min, jnp.max))
    step = jnp.maximum(high - low, 1e-8) / (2**rounding.bits - 1)
    exact = (groups - low) / step
    rounded = exact + lax.stop_gradient(jnp.round(exact) - exact)
    back = (rounded * step + low).reshape(turned.shape)
    return jnp.einsum("stke,khe->stkh", back, turn, precision=lax.Precision.HIGHEST)


def _exact(rows: Float[Array, "S T K H"], other: Array, texts: Texts) -> Array:
    """Return `other` with the sink and the tokens of the queries as they are in `rows`."""
    at, size = jnp.arange(rows.shape[1]), rows.shape[1]
    exact = (at < texts.sink) | (at >= size - texts.q.shape[1])
    return jnp.where(exact[None, :, None, None], rows, other)


def _log_weights(texts: Texts, k: Float[Array, "S T K H"]) -> Float[Array, "S K G W T"]:
    """Return the logarithms of the weights with which the last queries attend to keys."""
    scores = jnp.einsum("swkgh,stkh->skgwt", texts.q, k, precision=lax.Precision.HIGHEST)
    size, window = k.shape[1], texts.q.shape[1]
    later = jnp.arange(size)[None] > jnp.arange(size - window, size)[:, None]
    return jax.nn.log_softmax(jnp.where(later, -1e30, scores * texts.scale), axis=-1)


def _after_output(texts: Texts, weights: Array, v: Array) -> Float[Array, "S K G"]:
    """Return the mean square of (weights v) W_O."""
    summed = jnp.einsum("skgwt,stkh->skgwh", weights, v, precision=lax.Precision.HIGHEST)
    shift = jnp.einsum("skgwh,kghd->skgwd", summed, texts.output, precision=lax.Precision.HIGHEST)
    return jnp.mean(jnp.square(shift), axis=(-2, -1))


def _key_loss(rounding: Rounding, turn: Turn, texts: Texts) -> Float[Array, " K"]:
    k = _exact(texts.k, read(texts.k, turn, rounding), texts)
    log_p, log_rounded = _log_weights(texts, texts.k), _log_weights(texts, k)
    p = jnp.exp(log_p)
    divergence = jnp.mean(jnp.sum(p * (log_p - log_rounded), axis=-1), axis=-1)
    loss = divergence + _after_output(texts, jnp.exp(log_rounded) - p, texts.v)
    return jnp.mean(loss, axis=(0, 2))


def _value_loss(
    of_keys: Rounding, rounding: Rounding, turn: Turn, texts: Texts, k_turn: Turn
) -> Float[Array, " K"]:
    k = _exact(texts.k, read(texts.k, k_turn, of_keys), texts)
    away = _exact(texts.v, read(texts.v, turn, rounding), texts) - texts.v
    return jnp.mean(_after_output(texts, jnp.exp(_log_weights(texts, k)), away), axis=(0, 2))


def _learned(
    base: Float[np.ndarray, "K H H"],
    fixed: tuple[Turn, ...],
    learning: Texts,
    judging: Texts,
    loss: functools.partial[Float[Array, " K"]],
    steps: int,
) -> Float[np.ndarray, "K H H"]:
    """Return each head's best rotation."""
    first = jnp.asarray(base, jnp.float32)
    judge, slope = _compiled(loss.func, loss.args)
    best, turn = judge(first, judging, *fixed), first
    state = tuple(jnp.zeros_like(first) for _ in range(3))
    for step in range(steps):
        state = _adam(state, slope(state[0], first, learning, *fixed), jnp.float32(step + 1))
        if step % JUDGED == 0 or step == steps - 1:
            now = _compiled_turn(first, state[0])
            cost = judge(now, judging, *fixed)
            turn = jnp.where((cost < best)[:, None, None], now, turn)
            best = jnp.minimum(cost, best)
    return np.asarray(turn)


def _turn_of(first: Turn, a: Float[Array, "K H H"]) -> Turn:
    """Return R_0 exp(A - A^T)."""
    skew = a - jnp.swapaxes(a, 1, 2)
    return jnp.matmul(first, jax.scipy.linalg.expm(skew), precision=lax.Precision.HIGHEST)


_compiled_turn = jax.jit(_turn_of)


@functools.lru_cache(16)  # callers choose the options
def _compiled(function: Callable[..., Array], options: tuple) -> tuple[Callable, Callable]:
    """Return the loss of each head for a turn, and the slope of their mean in A."""
    loss = functools.partial(function, *options)

    def mean(a: Array, first: Turn, texts: Texts, *fixed: Turn) -> Array:
        return jnp.mean(loss(_turn_of(first, a), texts, *fixed))

    return jax.jit(loss), jax.jit(jax.grad(mean))


@jax.jit
def _adam(
    state: tuple[Array, Array, Array], slope: Array, step: Float[Array, ""]
) -> tuple[Array, Array, Array]:
    a, mean, square = state
    mean = MOMENTUM * mean + (1 - MOMENTUM) * slope
    square = SQUARES * square + (1 - SQUARES) * jnp.square(slope)
    corrected = mean / (1 - MOMENTUM**step), square / (1 - SQUARES**step)
    return a - RATE * corrected[0] / (jnp.sqrt(corrected[1]) + EPSILON), mean, square
