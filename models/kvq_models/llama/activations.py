"""The activations of MLPs and experts, computed in float32 and rounded once.

In bfloat16 each constant and product is rounded too: GELU is then off by 2 %, root mean square, and
not by the 0.2 % of one rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_models.llama.families import Activation


def activated(activation: Activation, gate: Float[Array, "... I"]) -> Float[Array, "... I"]:
    """Return silu(gate), or the tanh approximation of GELU, in the gate's dtype."""
    function = jax.nn.silu if activation == "silu" else jax.nn.gelu
    return function(gate.astype(jnp.float32)).astype(gate.dtype)


def clipped_swiglu(
    gate: Float[Array, "... I"], up: Float[Array, "... I"], limit: float, alpha: float
) -> Float[Array, "... I"]:
    """Return (clip(up, -limit, limit) + 1) g sigmoid(alpha g), with g = min(gate, limit), in the
    gate's dtype. Source: OpenAI, gpt-oss."""
    clipped = jnp.minimum(gate.astype(jnp.float32), limit)
    up = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return ((up + 1) * clipped * jax.nn.sigmoid(alpha * clipped)).astype(gate.dtype)
