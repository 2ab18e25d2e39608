"""The rotation of keys that were cached before RoPE, as tables for spans of tokens and for the
distances within a span.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.angles import cos_and_sin
from pallas_kernels.tiles.layout import SPAN


class TurnTables(NamedTuple):
    """Cosines and sines, fp32: [spans, H/2] for the position of every span's first token, [SPAN,
    H/2] for the distance from it.
    """

    start_cos: Float[Array, "spans half"]
    start_sin: Float[Array, "spans half"]
    cos: Float[Array, "32 half"]
    sin: Float[Array, "32 half"]


def turn(frequencies: Float[Array, " half"], starts: Int[Array, " spans"]) -> TurnTables:
    """Return the rotation of tokens in spans of SPAN neighbours that begin at `starts`."""
    return TurnTables(
        *cos_and_sin(starts, frequencies),
        *cos_and_sin(jnp.arange(SPAN, dtype=jnp.int32), frequencies),
    )
