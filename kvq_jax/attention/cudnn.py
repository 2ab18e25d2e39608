"""Attend to a prompt on a GPU: the new tokens by cuDNN's flash attention, older ones by XLA.

    out = merge( causal attention over the new tokens , [sink | ring] , body chunk 0, ... )

A prompt in an empty cache is one launch, and a branch that is not taken. cuDNN's log-sum-exp lets
the older part merge exactly.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvq_jax.attention import streaming
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.types.array_types import LayerInputs, PositionsBT, QueryBNTH, RowsBKTH, Tree


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
    valid = inputs.valid[:, None, :, None]
    rows = (jnp.where(valid, rows, 0) for rows in (inputs.k_rot, inputs.v))  # 0 * nan is nan
    attended = causal_attention(plan.attention, inputs.q_rot, *rows)
    queries = streaming.Queries(inputs.q_rot, inputs.positions, limits, attended)
    view = streaming.view_of(plan, params, windows, body, inputs, limits, appended=False)
    old = view.keys.shape[2] - inputs.q_rot.shape[2]
    older = view._replace(
        keys=view.keys[:, :, :old],
        values=view.values[:, :, :old],
        positions=view.positions[:, :old],
        real=view.real[:, :old],
    )

    def with_older() -> QueryBNTH:
        return streaming.attend_view(older, queries)

    def alone() -> QueryBNTH:
        part = streaming.attention_so_far(queries, plan.heads)
        return streaming.finished(plan, part, inputs.q_rot, inputs.sinks)

    return lax.cond(jnp.any(inputs.positions[:, 0] > 0), with_older, alone)


def causal_attention(
    attention: Attention, q: QueryBNTH, keys: RowsBKTH, values: RowsBKTH
) -> tuple[QueryBNTH, Float[Array, "B N T"]]:
    """Return (out, log-sum-exp) of queries over the tokens up to their own, with a window only the
    last ones. fp32 sums, weights rounded to the dtype of q.

    Padding follows the tokens of a row, so no query of a token sees it.

    Raises RuntimeError if JAX or cuDNN cannot.
    """
    # `jax.nn.dot_product_attention` rounds the log-sum-exp to the dtype of q: 3 % of a weight
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return fused.dot_product_attention(
        q,
        keys,
        values,
        scale=attention.factor(q.shape[-1]),
        mask_type=fused.MaskType.CAUSAL,
        qkv_layout="BNTH",
        sliding_window_length=attention.window,
        return_residual=True,
    )
