"""Rotary position embedding on half-split pairs, as a value that cache methods can re-apply.

    y_i       = a * (x_i * cos(p w_i) - x_{i+H/2} * sin(p w_i))
    y_{i+H/2} = a * (x_{i+H/2} * cos(p w_i) + x_i * sin(p w_i))

with p the token's position, w the inverse frequencies [H/2] and a the attention factor (1 except
for yarn and longrope), one for all pairs or one for each. A pair that does not rotate has w = 0 and
a = 1 (partial rotation). Angles are exact to 2^-24 turn at every position up to 2^24. Sines and
products are fp32, and the result has the dtype of the rows. Source: Su et al., RoFormer, section
3.4.2, in the pairing of Hugging Face's Llama.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.types.pytree import pytree
from pallas_kernels.angles import cos_and_sin


@pytree
@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary position embedding of one model.

    Attributes:
        inverse_frequencies: [H/2] fp32, in radians per token.
        attention_factor: [] or [H/2] fp32, which scales the rotated rows, or each of their pairs.
    """

    inverse_frequencies: Float[Array, " half"]
    attention_factor: Float[Array, "#*half"]

    def scaled(self, rows: Float[Array, "... H"]) -> Float[Array, "... H"]:
        """Return rows times the attention factor of their channels' pairs."""
        factor = self.attention_factor
        return _times(rows, jnp.tile(factor, 2) if jnp.ndim(factor) else factor)


def without_rotation(rope: Rope) -> Rope:
    """Return the rotation by nothing, for layers without position embedding. `rotate` then returns
    its rows bit for bit."""
    return Rope(jnp.zeros_like(rope.inverse_frequencies), jnp.ones_like(rope.attention_factor))


def rotate(
    rows: Float[Array, "B _ _ H"],
    positions: Int[Array, "#B T"],
    rope: Rope,
    *,
    layout: Literal["BTNH", "BNTH"] = "BNTH",
) -> Float[Array, "B _ _ H"]:
    """Rotate rows to their positions.

        y_i       = a * (x_i * cos(p w_i) - x_{i+H/2} * sin(p w_i))
        y_{i+H/2} = a * (x_{i+H/2} * cos(p w_i) + x_i * sin(p w_i))

    Computed in fp32, with angles exact to 2^-24 turn at positions up to 2^24. Source: Su et al.,
    RoFormer, section 3.4.2, in the pairing of Hugging Face's Llama.

    Args:
        rows: [B, K, T, H], with any number of heads, or [B, T, K, H] if `layout` says so.
        positions: [B, T] or [1, T], the position p of each token.
        rope: the inverse frequencies w and the attention factor a.
        layout: the order of the axes of rows.

    Returns:
        The rotated rows, in the shape and the dtype of `rows`.

    Raises:
        ValueError: in one line, if the layout is unknown, or shapes do not fit each other.
    """
    if layout not in ("BTNH", "BNTH"):
        raise ValueError(f"{layout=}: choose 'BTNH' or 'BNTH'")
    tokens, shape = layout.index("T"), jnp.shape(rows)
    fitting = [(count, shape[tokens]) for count in (shape[0], 1)] if len(shape) == 4 else []
    if jnp.shape(positions) not in fitting:
        raise ValueError(
            f"rows [{', '.join(layout)}] and positions [B, T] or [1, T] must fit, got"
            f" {list(shape)} and {list(jnp.shape(positions))}"
        )
    if rows.shape[-1] != 2 * (pairs := len(rope.inverse_frequencies)):
        raise ValueError(
            f"rows of {rows.shape[-1]} channels have {rows.shape[-1] // 2} inverse frequencies in a"
            f" Rope, got {pairs}: one for each pair (i, i + H / 2), 0 for pairs that do not rotate"
        )
    # Without the barrier, XLA computes a token's cosines again for each of its heads
    # (docs/decisions/angles.md).
    cos, sin = (
        jnp.expand_dims(table, 3 - tokens)
        for table in lax.optimization_barrier(cosines_and_sines(positions, rope))
    )
    first, second = jnp.split(rows.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(rows.dtype)


def cosines_and_sines(
    positions: Int[Array, "B T"], rope: Rope
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return (a cos(p w), a sin(p w)) in fp32: tables [B, T, H/2] that serve all heads of a token.

    Their error is at most 2e-7 a at positions up to 2^24, and 1e-6 a at any position
    (pallas_kernels/angles.py).
    """
    cos, sin = cos_and_sin(positions, jnp.asarray(rope.inverse_frequencies, jnp.float32))
    return _times(cos, rope.attention_factor), _times(sin, rope.attention_factor)


def _times(rows: Float[Array, "... C"], factor: Float[Array, "..."]) -> Float[Array, "... C"]:
    """Return rows times one factor, or one for each entry of the last axis."""
    factor = jnp.asarray(factor, jnp.float32)
    return rows * (jnp.expand_dims(factor, range(rows.ndim - 1)) if factor.ndim else factor)
