"""The arrays of one layer's body, and the queries for keys before RoPE in a body that wraps around,
as the C++ kernel and the GPU kernels take them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.layer.plan import LayerPlan, Sides
from kvq_jax.types.array_types import LengthsB, Tree
from kvq_jax.types.rope import Rope, rotate


class BodyView(NamedTuple):
    """The arrays of one layer's body."""

    plan: LayerPlan
    params: Tree
    stats: Sides
    body: Sides
    rope: Rope | None


def rotated_back(
    query: Float[Array, "B K R H"], begun: LengthsB, tokens: int, rope: Rope
) -> tuple[Float[Array, "B K R H"], Float[Array, "B K R H"]]:
    """Return the queries for keys before RoPE in a ring of `tokens`: in the round that began
    at token `begun`, and in the round before. Kernels take places for positions:
    q . R(round + place) k = R(-round) q . R(place) k."""
    plain = dataclasses.replace(rope, attention_factor=jnp.ones((), jnp.float32))
    rows = query.astype(jnp.float32).reshape(len(query), -1, 1, query.shape[-1])
    now, before = (rotate(rows, at[:, None], plain) for at in (-begun, tokens - begun))
    return now.reshape(query.shape), before.reshape(query.shape)
