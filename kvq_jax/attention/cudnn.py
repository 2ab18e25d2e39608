"""Attend to a prompt on a GPU by cuDNN's flash attention.

    out = merge( causal attention over the new tokens , [sink | ring] , body chunk 0, ... )

A prompt in an empty cache is one launch, and a branch that is not taken. Older tokens are read by
cuDNN too, the body dequantized chunk by chunk and rounded to the dtype of the queries. Parts merge
exactly by their log-sum-exp. XLA reads older tokens in layers with a window, and of cross-layer
methods.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.attention import dequantized_body, online_softmax, streaming
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, QueryBNTH, RowsBKTH, Tree
from pallas_kernels.decode_attention.partial_attention import NEG_INF, PartialAttention

DEQUANTIZED_ELEMENTS = 1 << 22  # of keys or values that are dequantized at a time


def unsupported(plan: LayerPlan, inputs: LayerInputs) -> str | None:
    """Return, in one line, why cuDNN cannot attend to this prompt, or None if it can. JAX checks
    the dtype, the head dim, and the version of cuDNN."""
    tokens, shortest = inputs.q_rot.shape[2], streaming.QUERY_CHUNK + 1
    if tokens < shortest:
        return f"{tokens} tokens in one call; XLA reads fewer than {shortest} in one pass"
    if plan.attention.soft_cap is not None:
        return "soft caps, which cuDNN's attention in JAX does not have"
    arrays = inputs.q_rot, inputs.k_rot, inputs.v
    if len({array.dtype for array in arrays}) > 1:
        return "queries, keys and values of several dtypes, and cuDNN reads one"
    try:
        jax.eval_shape(functools.partial(causal_attention, plan.attention), *arrays)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        return str(error).partition("\n")[0]  # the last three from a JAX with another function
    return None


def attend(
    plan: LayerPlan,
    params: Tree,
    windows: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
) -> QueryBNTH:
    """Attend as `streaming.attend` does. The arguments are the same. XLA serves what cuDNN does
    not."""
    if unsupported(plan, inputs):
        return streaming.attend(plan, params, windows, body, inputs, limits)
    view = streaming.view_of(plan, params, windows, body, inputs, limits, appended=False)
    old = view.keys.shape[2] - inputs.q_rot.shape[2]
    valid = inputs.valid[:, None, :, None]
    rows = (jnp.where(valid, rows, 0) for rows in (inputs.k_rot, inputs.v))  # 0 * nan is nan
    attended = causal_attention(plan.attention, inputs.q_rot, *rows)
    queries = streaming.Queries(inputs.q_rot, inputs.positions, limits, attended)
    older = view._replace(
        keys=view.keys[:, :, :old],
        values=view.values[:, :, :old],
        positions=view.positions[:, :old],
        real=view.real[:, :old],
    )

    def with_older() -> QueryBNTH:
        # cuDNN bounds older tokens from above alone; a body of differences has no vectors
        if plan.attention.window is not None or plan.cross_layer is not None:
            return streaming.attend_view(older, queries)
        return streaming.output_of(plan, _with_older(older, queries), inputs.q_rot, inputs.sinks)

    def alone() -> QueryBNTH:
        part = streaming.attention_so_far(queries, plan.heads)
        return streaming.output_of(plan, part, inputs.q_rot, inputs.sinks)

    return lax.cond(jnp.any(inputs.positions[:, 0] > 0), with_older, alone)


def _with_older(view: streaming.View, queries: streaming.Queries) -> PartialAttention:
    """Return the attention of the queries, with sink, ring and body added. All see the same
    tokens."""
    plan, limits = view.plan, queries.limits
    part = streaming.attention_so_far(queries, plan.heads)
    seen = view.real & streaming.outside_body(plan.regions, view.positions, limits[:, :1])

    def attend(
        keys: RowsBKTH, values: RowsBKTH, _: Int[Array, "B C"], seen: Bool[Array, "B C"]
    ) -> PartialAttention:
        first = jnp.argsort(~seen, axis=1)[:, None, :, None]  # tokens that are seen come first

        def sorted_rows(rows: RowsBKTH) -> RowsBKTH:
            rows = jnp.where(seen[:, None, :, None], rows, 0).astype(queries.q.dtype)
            return jnp.take_along_axis(rows, first, axis=2)

        count = jnp.sum(seen, axis=1, dtype=jnp.int32)
        arrays = queries.q, sorted_rows(keys), sorted_rows(values), count
        out, lse = whole_attention(plan.attention, *arrays)
        some = (count > 0)[:, None, None]
        attended = jnp.where(some[..., None], out, 0), jnp.where(some, lse, NEG_INF)
        return streaming.attention_so_far(queries._replace(attended=attended), plan.heads)

    if seen.shape[1]:
        part = online_softmax.merge(part, attend(view.keys, view.values, view.positions, seen))
    if not (size := plan.regions.read_capacity):
        return part
    chunk = dequantized_tokens(plan, len(limits), size)
    add = functools.partial(
        dequantized_body.add_body, view, queries.positions, limits, chunk, attend
    )
    return online_softmax.add_across(part, plan.regions.axis, add)


def dequantized_tokens(plan: LayerPlan, batch: int, size: int) -> int:
    """Return how many tokens of a body of `size` are dequantized at a time: whole blocks."""
    block = plan.regions.block
    blocks = DEQUANTIZED_ELEMENTS // (batch * plan.heads * plan.head_dim * block)
    return min(max(blocks, 1) * block, size)


def causal_attention(
    attention: Attention, q: QueryBNTH, keys: RowsBKTH, values: RowsBKTH
) -> tuple[QueryBNTH, Float[Array, "B N T"]]:
    """Return (out, log-sum-exp) of queries over the tokens up to their own, with a window only the
    last ones. fp32 sums, weights rounded to the dtype of q.

    Padding follows the tokens of a row, so no query of a token sees it.

    Raises RuntimeError if JAX or cuDNN cannot.
    """
    mask = {"mask_type": _fused().MaskType.CAUSAL, "sliding_window_length": attention.window}
    return _dot_product_attention(attention, q, keys, values, mask)


def whole_attention(
    attention: Attention,
    q: QueryBNTH,
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    count: LengthsB,
) -> tuple[QueryBNTH, Float[Array, "B N T"]]:
    """Return (out, log-sum-exp) of all queries over the first count[b] tokens, which are not
    specified for a count of 0."""
    queries = jnp.full_like(count, q.shape[2])
    mask = {"mask_type": _fused().MaskType.PADDING, "q_seqlen": queries, "kv_seqlen": count}
    return _dot_product_attention(attention, q, keys, values, mask)


def _dot_product_attention(
    attention: Attention,
    q: QueryBNTH,
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    mask: dict[str, Any],
) -> tuple[QueryBNTH, Float[Array, "B N T"]]:
    options = {"qkv_layout": "BNTH", "scale": attention.factor(q.shape[-1])}
    return _fused().dot_product_attention(q, keys, values, **options, **mask, return_residual=True)


def _fused() -> types.ModuleType:
    # `jax.nn.dot_product_attention` rounds the log-sum-exp to the dtype of q: 3 % of a weight
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
