"""A mixture of experts in place of the MLP (Mixtral, Qwen3-MoE, gpt-oss).

    p    = softmax(y Wr), fp32
    w    = the largest `per_token` entries of p, divided by their sum if `normalized`
    out  = sum_e w_e (silu(y Wg_e) * (y Wu_e)) Wd_e

With `swiglu_limit` c and `swiglu_alpha` a (gpt-oss), each product has a bias, and the inner
activation of gate g and u is (clip(u, -c, c) + 1) * g' sigmoid(a g'), g' = min(g, c).

Many tokens are sorted by expert, so that each expert's tokens are one product with its weights
(`jax.lax.ragged_dot`). Few tokens take their experts' weights instead: a step reads the chosen
experts and no others. Packed experts (packed_experts.py) are one call either way. Source: Shazeer
et al., Outrageously Large Neural Networks; Jiang et al., Mixtral of Experts, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvq_models.llama.experts_config import ExpertsConfig
from kvq_models.llama.initial_weights import constant, normal
from kvq_models.llama.packed_experts import expert_products
from kvq_models.llama.packed_weights import is_packed


class Experts(nnx.Module):
    """The router [D, E] and the experts' projections, gate and up [E, D, I], down [E, I, D], each
    with a bias [E, ...] or None."""

    def __init__(
        self, config: ExpertsConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs | None
    ):
        def random(*shape: int) -> nnx.Param:
            return normal(rngs, *shape, dtype=dtype)

        count, inner = config.count, config.intermediate_size
        self.config = config
        self.router = random(width, count)
        self.gate = random(count, width, inner)
        self.up = random(count, width, inner)
        self.down = random(count, inner, width)

        def bias(*shape: int) -> nnx.Param | None:
            return constant(rngs, 0, *shape, dtype=dtype) if config.biased else None

        self.router_bias = bias(count)
        self.gate_bias = bias(count, inner)
        self.up_bias = bias(count, inner)
        self.down_bias = bias(count, width)

    def __call__(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows = y_BTD.reshape(-1, y_BTD.shape[-1])
        weights, chosen = self._route(rows)
        if is_packed(self.gate[...]):
            computed = self._packed(rows, chosen)
        elif chosen.size <= self.config.count:
            computed = self._by_token(rows, chosen)
        else:
            computed = self._by_expert(rows, chosen)
        out = jnp.einsum("nkd,nk->nd", computed, weights.astype(computed.dtype))
        return out.reshape(y_BTD.shape)

    def _route(self, rows: Float[Array, "n D"]) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
        """Return the experts of each token and their weights."""
        logits = rows @ self.router[...]
        if self.router_bias is not None:
            logits = logits + self.router_bias[...][None]
        logits = logits.astype(jnp.float32)
        weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), self.config.per_token)
        if self.config.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen

    def _packed(
        self, rows: Float[Array, "n D"], chosen: Int[Array, "n k"]
    ) -> Float[Array, "n k D"]:
        flat = chosen.reshape(-1)
        repeated = jnp.repeat(rows, self.config.per_token, axis=0)
        gate, up = expert_products(repeated, flat, (self.gate[...], self.up[...]))
        (down,) = expert_products(self._inner(gate, up, flat), flat, (self.down[...],))
        return self._biased(down, self.down_bias, flat).reshape(*chosen.shape, -1)

    def _by_token(
        self, rows: Float[Array, "n D"], chosen: Int[Array, "n k"]
    ) -> Float[Array, "n k D"]:
        gate, up, down = (kernel[...][chosen] for kernel in (self.gate, self.up, self.down))
        gate, up = (jnp.einsum("nd,nkdi->nki", rows, kernel) for kernel in (gate, up))
        inner = self._inner(gate, up, chosen)
        return self._biased(jnp.einsum("nki,nkid->nkd", inner, down), self.down_bias, chosen)

    def _by_expert(
        self, rows: Float[Array, "n D"], chosen: Int[Array, "n k"]
    ) -> Float[Array, "n k D"]:
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=self.config.count).astype(jnp.int32)
        sorted_rows, expert = rows[order // self.config.per_token], flat[order]
        gate, up = (lax.ragged_dot(sorted_rows, k[...], counts) for k in (self.gate, self.up))
        inner = self._inner(gate, up, expert)
        computed = lax.ragged_dot(inner, self.down[...], counts)
        computed = self._biased(computed, self.down_bias, expert)
        return computed[jnp.argsort(order)].reshape(*chosen.shape, rows.shape[1])

    def _inner(
        self,
        gate: Float[Array, "*tokens I"],
        up: Float[Array, "*tokens I"],
        expert: Int[Array, "*tokens"],
    ) -> Float[Array, "*tokens I"]:
        """Return the inner activation of tokens at their experts."""
        gate, up = (
            self._biased(gate, self.gate_bias, expert),
            self._biased(up, self.up_bias, expert),
        )
        limit = self.config.swiglu_limit
        if limit is None:
            return jax.nn.silu(gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.config.swiglu_alpha * gate)

    @staticmethod
    def _biased(
        rows: Float[Array, "*tokens E"], bias: nnx.Param | None, expert: Int[Array, "*tokens"]
    ) -> Float[Array, "*tokens E"]:
        return rows if bias is None else rows + bias[...][expert]
