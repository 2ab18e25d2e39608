"""Exact causal attention inside one sequence, without a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.attention.logits import attention_logits, inside_window
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.types.array_types import QueryBNTH, RowsBKTH, ValidBT


def causal_attention(
    q_BNTH: QueryBNTH,
    k_BKTH: RowsBKTH,
    v_BKTH: RowsBKTH,
    valid_BT: ValidBT,
    attention: Attention = PLAIN,
    sinks_N: Float[Array, " N"] | None = None,
) -> QueryBNTH:
    """Return softmax(q k^T / sqrt(H)) v over the earlier valid tokens that `attention` lets a query
    see. Exact, with an fp32 softmax. The result has the dtype of v.

    Query head n reads KV head n // G: the G query heads of one KV head are rows of one product, and
    K, V are never repeated. A query with no valid key averages over padding, which is finite and
    unused.
    """
    batch, heads, length, head_dim = q_BNTH.shape
    groups = heads // k_BKTH.shape[1]
    q_BKGTH = q_BNTH.reshape(batch, -1, groups, length, head_dim)
    scores_BKGTS = attention_logits(
        attention,
        jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k_BKTH, preferred_element_type=jnp.float32),
        head_dim,
    )
    query_T1, key_1S = jnp.arange(length)[:, None], jnp.arange(length)[None]
    seen_TS = (key_1S <= query_T1) & inside_window(attention, query_T1, key_1S)
    visible_BTS = seen_TS[None] & valid_BT[:, None, :]
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)
    if sinks_N is not None:
        sinks_KG11 = sinks_N.astype(jnp.float32).reshape(-1, groups, 1, 1)
        sinks_BKGT1 = jnp.broadcast_to(sinks_KG11, (*scores_BKGTS.shape[:-1], 1))
        scores_BKGTS = jnp.concatenate([scores_BKGTS, sinks_BKGT1], axis=-1)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)[..., :length].astype(v_BKTH.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights_BKGTS, v_BKTH).reshape(q_BNTH.shape)
