"""What the adapters share: rows that a host pads on the left, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

import kvq_jax as kvq


def left_padded_lengths(visible: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Return the tokens of each row from its first visible one on: 0 for a row of padding alone.

    Hosts find padding by its token id, which may also be inside a prompt: tunix takes the end of a
    turn for a tokenizer without a padding token. Such a token is real here, and is read.

    Args:
        visible: False for tokens that have the padding's id.
    """
    tokens = visible.shape[1] - jnp.argmax(visible, axis=1)
    return jnp.where(jnp.any(visible, axis=1), tokens, 0).astype(jnp.int32)


def check_on_one_device(weights: Any, host: str) -> None:
    """Raise NotImplementedError if a pytree of weights is on several devices: the adapter of `host`
    neither splits the cache as the host splits its own nor keeps the host's constraints."""
    for leaf in jax.tree.leaves(weights):
        traced = isinstance(leaf, Tracer)
        if isinstance(leaf, jax.Array) and not traced and len(leaf.sharding.device_set) > 1:
            devices = len(leaf.sharding.device_set)
            raise NotImplementedError(
                f"a model of {host} on {devices} devices has no adapter: load it on one device"
            )


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
