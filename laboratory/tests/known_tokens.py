"""An oracle's knowledge of the tokens in a cache, and the attention that is exact for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from tests.kvq_jax.cache_runs import DIMS


def exact_attention(inputs: kvq.types.LayerInputs, held: kvq.types.LayerInputs) -> np.ndarray:
    """Return softmax(q k^T / sqrt(H)) v [B, N, T, H] of the queries of `inputs` over the tokens of
    `held` up to their own, in float64."""
    real = np.asarray(held.valid)[:, None, :, None]
    q, k, v = (
        np.asarray(a, np.float64)
        for a in (inputs.q_rot, np.where(real, held.k_rot, 0), np.where(real, held.v, 0))
    )
    k, v = (
        np.repeat(rows, DIMS.num_attention_heads // DIMS.num_key_value_heads, axis=1)
        for rows in (k, v)
    )
    scores = np.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(DIMS.head_dim)
    seen = np.asarray(inputs.positions)[:, :, None] >= np.arange(k.shape[2])
    weights = np.exp(
        np.where(
            seen[:, None],
            scores - scores.max(-1, keepdims=True, where=seen[:, None], initial=-1e30),
            -np.inf,
        )
    )
    return np.einsum("bnts,bnsh->bnth", weights / weights.sum(-1, keepdims=True), v)


@dataclasses.dataclass
class Known:
    """The oracle's knowledge of each row. ids [B, S]; stats: by layer, the statistics of the first
    prompt and of what came before a block was quantized. returned [B, S]: which tokens came back
    from the body; given: their rows [B, K, S, C] by layer and side. recoded, sources: the same of
    the rows from which blocks were quantized. intact [B]: body tokens whose codes a trim left.
    """

    ids: np.ndarray
    lengths: np.ndarray
    stats: list[Any]
    returned: np.ndarray
    given: list[list[np.ndarray]]
    recoded: np.ndarray
    sources: list[list[np.ndarray]]
    intact: np.ndarray

    def rows(self, index: np.ndarray, other: Known | None = None) -> Known:
        """Return rows of this, or of this and the rows of another after them."""

        def pick(mine: np.ndarray, others: np.ndarray) -> np.ndarray:
            return np.concatenate([mine, others])[index].copy()

        return jax.tree.map(pick, self, self if other is None else other)


jax.tree_util.register_dataclass(Known)
