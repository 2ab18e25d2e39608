"""Refuse methods that read more than a host's attention layer gives them."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jaxtyping import Array

import kvq_jax as kvq


def check_served(plans: Iterable[kvq.cache.CachePlan], host: str) -> None:
    """Raise ValueError if a method reads more than queries, keys and values, which are all that
    the adapter of `host` gives it. Nothing is computed: a step of each kind of layer is traced.

    Args:
        plans: the plans of all layers.
        host: the name of the project, for the message.
    """
    for plan in dict.fromkeys(plans):

        def step(q: Array, k: Array, v: Array, plan: kvq.cache.CachePlan = plan) -> Array:
            return plan.attend(plan.init(1), q, k, v, prefill=True)[0]

        dims = plan.dims
        q, k = (
            jax.ShapeDtypeStruct((1, 2, heads, dims.head_dim), plan.dtype)
            for heads in (dims.num_attention_heads, dims.num_key_value_heads)
        )
        try:
            jax.eval_shape(step, q, k, k)
        except ValueError as error:
            message = f"{host} gives a cache queries, keys and values alone: {error}"
            raise ValueError(message) from None
