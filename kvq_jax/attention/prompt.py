"""Attend to a prompt by the C++ kernel of cpu_kernels/exact_attention.py.

    out = merge( [sink | ring | new tokens] , body chunk 0, body chunk 1, ... )

as `streaming.attend` does, but no matrix of scores exists, and a chunk of the body is dequantized
once for all queries. The kernel reads vectors, so every codec but those of cross-layer methods is
served.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from cpu_kernels.exact_attention import DTYPES, MAX_CHANNELS, exact_attention
from kvq_jax.attention import dequantized_body, online_softmax, streaming
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.types.array_types import LayerInputs, PositionsBT, QueryBNTH, RowsBKTH, Tree
from pallas_kernels.decode_attention.partial_attention import PartialAttention


def serves(plan: LayerPlan, dtype: DTypeLike) -> bool:
    """Return True if the kernel serves this layer. The body of a cross-layer method holds
    differences from the layer below, of which single layers have no vectors."""
    return (
        plan.cross_layer is None
        and jnp.dtype(dtype).name in DTYPES
        and plan.head_dim <= MAX_CHANNELS
    )


def attend(
    plan: LayerPlan,
    params: Tree,
    windows: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
) -> QueryBNTH:
    """Attend as `streaming.attend` does. The arguments are the same, and the queries of a row of
    the batch see the same body: limits[b] is constant. XLA serves what the kernel does not."""
    batch, heads, tokens, head_dim = inputs.q_rot.shape
    if not serves(plan, windows.ring[0].dtype):
        return streaming.attend(plan, params, windows, body, inputs, limits)
    view = streaming.view_of(plan, params, windows, body, inputs, limits, appended=False)
    rows = inputs.q_rot.reshape(batch, plan.heads, heads // plan.heads * tokens, head_dim)
    old = view.keys.shape[2] - tokens
    outside = streaming.outside_body(plan.regions, view.positions[:, :old], limits[:, :1])
    reach = _reach(plan, inputs, view.positions[:, :old], view.real[:, :old] & outside)
    counts = jnp.broadcast_to(jnp.arange(1, tokens + 1, dtype=jnp.int32), (batch, tokens))
    real = jnp.sum(inputs.valid, axis=1, dtype=jnp.int32)
    part = _attention(plan, rows, view.keys, view.values, reach, counts, real)
    add = functools.partial(_add_body, view, inputs, rows, limits)
    part = online_softmax.add_across(part, plan.regions.axis, add)
    return streaming.output_of(plan, part, inputs.q_rot, inputs.sinks)


def _reach(
    plan: LayerPlan, inputs: LayerInputs, positions: Int[Array, "B E"], seen: Bool[Array, "B E"]
) -> Int[Array, "B E"]:
    """Return how many of the prompt's tokens see older ones at these positions: all, or those with
    the position inside their windows."""
    start, tokens = inputs.positions[:, :1], inputs.positions.shape[1]
    window = plan.attention.window
    reach = tokens if window is None else positions + window - start
    return jnp.where(seen, reach, 0)


def _attention(
    plan: LayerPlan,
    rows: Float[Array, "B K R H"],
    keys: Float[Array, "B K E H"],
    values: Float[Array, "B K E H"],
    reach: Int[Array, "B E0"],
    counts: Int[Array, "B T"],
    real: Int[Array, "B"],
) -> PartialAttention:
    if keys.dtype != values.dtype:
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    attention = plan.attention
    options = {"scale": attention.factor(rows.shape[-1]), "soft_cap": attention.soft_cap}
    arrays = rows, keys, values, reach, counts, real
    part = exact_attention(*arrays, window=attention.window, **options)
    return PartialAttention(*part)


def _add_body(
    view: streaming.View,
    inputs: LayerInputs,
    rows: Float[Array, "B K R H"],
    limits: PositionsBT,
    part: PartialAttention,
) -> PartialAttention:
    """Return `part` with the body added."""
    plan, size = view.plan, view.plan.regions.read_capacity
    if not size:
        return part
    chunk = streaming.chunk_tokens(plan.regions.block, size, rows[:, :, :1], plan.row_width)
    none = jnp.zeros(limits.shape, jnp.int32)
    real = jnp.sum(inputs.valid, axis=1, dtype=jnp.int32)

    def attend(
        keys: RowsBKTH, values: RowsBKTH, positions: Int[Array, "B C"], seen: Bool[Array, "B C"]
    ) -> PartialAttention:
        reach = _reach(plan, inputs, positions, seen)
        return _attention(plan, rows, keys, values, reach, none, real)

    return dequantized_body.add_body(view, inputs.positions, limits, chunk, attend, part)
