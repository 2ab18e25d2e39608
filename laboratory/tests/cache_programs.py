"""Compiled operations on caches, and the one that fills a fresh cache with everything at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.attention.dispatch import XLA
from kvq_jax.cache.update import append_layer, decode_layer, prefill_layer, take_tokens
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer import cross_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import Tree
from tests.kvq_jax import layer_runs
from tests.kvq_jax.layer_runs import quick_jit


def _returning(codec: Codec, given: jax.Array, returned: jax.Array) -> Codec:
    """Return the codec, with `given` rows [B, K, T, C] in the place of those of the tokens that
    `returned` [B, T] from the body."""

    class Returning(type(codec)):
        def rows(self, params: Tree, inputs: kvq.types.LayerInputs) -> jax.Array:
            rows = super().rows(params, inputs)
            return jnp.where(returned[:, None, :, None], given.astype(rows.dtype), rows)

    held = copy.copy(codec)
    object.__setattr__(held, "__class__", Returning)
    return held


def _fill(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    inputs: kvq.types.LayerInputs,
    carry: Tree,
    given: tuple[tuple[jax.Array, ...], jax.Array],
    sources: tuple[tuple[jax.Array, ...], jax.Array],
) -> tuple[LayerState, Tree]:
    """Fill a fresh layer. `given` are the values of some tokens in the window, `sources` those from
    which the body is quantized, each with the mask of the tokens."""
    codecs = [
        _returning(codec, rows, sources[1])
        for codec, rows in zip(plan.codecs, sources[0], strict=True)
    ]
    after = append_layer(
        dataclasses.replace(plan, k=codecs[0], v=codecs[-1]),
        params,
        state,
        inputs,
        carry,
        prefill=True,
    )
    lengths = jnp.sum(inputs.valid, axis=1, dtype=jnp.int32)
    position = jnp.maximum(plan.regions.ring_positions(lengths), 0)
    returned = jnp.take_along_axis(given[1], position, axis=1)[:, None, :, None]
    ring = tuple(
        jnp.where(returned, take_tokens(rows, position).astype(slots.dtype), slots)
        for rows, slots in zip(given[0], after.ring, strict=True)
    )
    after = dataclasses.replace(after, ring=ring)
    body = plan.regions.aged_tokens(lengths)
    return after, cross_layer.advance(plan, params, after, body, carry)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The operations under test, compiled. fill: what makes a fresh cache."""

    fill: Callable
    prefill: Callable
    decode: Callable
    trim: Callable
    selected: Callable
    repeated: Callable
    merged: Callable


def compiled() -> Programs:
    """Return the operations as they are now, a fault that a test planted included."""
    return Programs(
        fill=quick_jit(lambda *a: _fill(*a), static_argnums=0),
        prefill=quick_jit(lambda *a: prefill_layer(*a), static_argnums=0),
        decode=quick_jit(lambda *a: decode_layer(*a, route=XLA), static_argnums=0),
        trim=quick_jit(lambda *a: kvq.rows.trim(*a)),
        selected=quick_jit(lambda cache, index: kvq.rows.select(cache, index)),
        repeated=quick_jit(lambda cache, index: kvq.rows.select(kvq.rows.repeat(cache, 2), index)),
        merged=quick_jit(
            lambda cache, other, index: kvq.rows.select(kvq.rows.merge(cache, other), index)
        ),
    )


SOUND = dataclasses.replace(compiled(), prefill=layer_runs.prefill, decode=layer_runs.decode)
