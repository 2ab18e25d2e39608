"""A mixture of experts in place of the MLP (Mixtral, Qwen3-MoE).

    p    = softmax(y Wr), fp32
    w    = the largest `per_token` entries of p, divided by their sum if `normalized`
    out  = sum_e w_e (silu(y Wg_e) * (y Wu_e)) Wd_e

Many tokens are sorted by expert, so that each expert's tokens are one product with its weights
(`jax.lax.ragged_dot`). Few tokens take their experts' weights instead: a step reads the chosen
experts and no others. Source: Shazeer et al., Outrageously Large Neural Networks; Jiang et al.,
Mixtral of Experts, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvq_models.llama.experts_config import ExpertsConfig

INITIAL_STDDEV = 0.02


class Experts(nnx.Module):
    """The router [D, E] and the experts' projections, gate and up [E, D, I], down [E, I, D]."""

    def __init__(self, config: ExpertsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def random(*shape: int) -> nnx.Param:
            return nnx.Param(INITIAL_STDDEV * jax.random.normal(rngs.params(), shape, dtype))

        count, inner = config.count, config.intermediate_size
        self.config = config
        self.router = random(width, count)
        self.gate = random(count, width, inner)
        self.up = random(count, width, inner)
        self.down = random(count, inner, width)

    def __call__(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows = y_BTD.reshape(-1, y_BTD.shape[-1])
        weights, chosen = self._route(rows)
        few = chosen.size <= self.config.count
        computed = self._by_token(rows, chosen) if few else self._by_expert(rows, chosen)
        out = jnp.einsum("nkd,nk->nd", computed, weights.astype(computed.dtype))
        return out.reshape(y_BTD.shape)

    def _route(self, rows: Float[Array, "n D"]) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
        """Return the experts of each token and their weights."""
        logits = (rows @ self.router[...]).astype(jnp.float32)
        weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), self.config.per_token)
        if self.config.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen

    def _by_token(
        self, rows: Float[Array, "n D"], chosen: Int[Array, "n k"]
    ) -> Float[Array, "n k D"]:
        gate, up, down = (kernel[...][chosen] for kernel in (self.gate, self.up, self.down))
        inner = jax.nn.silu(jnp.einsum("nd,nkdi->nki", rows, gate))
        return jnp.einsum("nki,nkid->nkd", inner * jnp.einsum("nd,nkdi->nki", rows, up), down)

    def _by_expert(
        self, rows: Float[Array, "n D"], chosen: Int[Array, "n k"]
    ) -> Float[Array, "n k D"]:
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=self.config.count).astype(jnp.int32)
        sorted_rows = rows[order // self.config.per_token]
        inner = jax.nn.silu(lax.ragged_dot(sorted_rows, self.gate[...], counts))
        inner = inner * lax.ragged_dot(sorted_rows, self.up[...], counts)
        computed = lax.ragged_dot(inner, self.down[...], counts)
        return computed[jnp.argsort(order)].reshape(*chosen.shape, rows.shape[1])
