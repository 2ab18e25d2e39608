"""Rotary position embedding on half-split pairs, as a value that cache methods can re-apply.

    y_i       = a * (x_i * cos(p w_i) - x_{i+H/2} * sin(p w_i))
    y_{i+H/2} = a * (x_{i+H/2} * cos(p w_i) + x_i * sin(p w_i))

with p the token's position, w the inverse frequencies [H/2] and a the attention factor (1 but for yarn).
Angles, sines and products are fp32; the result has the dtype of the rows. Source: Su et al., RoFormer, section 3.4.2, in the pairing of
Hugging Face's Llama.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of one model: inverse_frequencies [H/2] fp32 in radians per token, attention_factor [] fp32."""

    inverse_frequencies: Float[Array, " half"]
    attention_factor: Float[Array, ""]


def rotate(rows: Float[Array, "B K T H"], positions: Int[Array, "B T"], rope: Rope) -> Float[Array, "B K T H"]:
    """Rotates rows [B, K, T, H] (any head count) to their positions [B, T]."""
    angles_BTh = positions[..., None].astype(jnp.float32) * rope.inverse_frequencies[None, None]
    cos_B1Th = (jnp.cos(angles_BTh) * rope.attention_factor)[:, None]
    sin_B1Th = (jnp.sin(angles_BTh) * rope.attention_factor)[:, None]
    first, second = jnp.split(rows.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos_B1Th - second * sin_B1Th, second * cos_B1Th + first * sin_B1Th], axis=-1)
    return rotated.astype(rows.dtype)
