"""A mixture of experts in place of the MLP (Mixtral, Qwen3-MoE, gpt-oss).

    p    = softmax(y Wr), fp32
    w    = the largest `per_token` entries of p, divided by their sum if `normalized`
    out  = sum_e w_e (silu(y Wg_e) * (y Wu_e)) Wd_e

With `swiglu_limit` c and `swiglu_alpha` a (gpt-oss), each product has a bias, and the inner
activation of gate and u is that of activations.clipped_swiglu.

Many tokens are sorted by expert, so that each expert's tokens are one product with its weights
(`jax.lax.ragged_dot`). Few tokens take their experts' weights instead: a step reads the chosen
experts and no others. Packed experts (packed_experts.py) are one call either way.

On a mesh whose size divides the number of experts, each device holds whole experts (sharding.py).
It routes all tokens, computes those that chose its experts, and the outputs are added: one
all-reduce of [B, T, D]. Source: Shazeer et al., Outrageously Large Neural Networks; Jiang et al.,
Mixtral of Experts, section 2.1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.placement.placement import Placement
from kvq_models.llama.activations import activated, clipped_swiglu
from kvq_models.llama.experts_config import ExpertsConfig
from kvq_models.llama.initial_weights import constant, normal
from kvq_models.llama.packed_experts import expert_products
from kvq_models.llama.packed_weights import is_packed
from kvq_models.llama.weight_axes import split_by


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

    def __call__(
        self, y_BTD: Float[Array, "B T D"], placement: Placement | None = None
    ) -> Float[Array, "B T D"]:
        """Return the experts' outputs, weighted and summed.

        placement (static): of the tokens. On its mesh, devices may hold different experts.
        """
        packed = is_packed(self.gate[...])
        if placement is not None and not packed and split_by(self.config.count, placement):
            return self._on_shards(y_BTD, placement)
        rows = y_BTD.reshape(-1, y_BTD.shape[-1])
        weights, chosen = self._route(rows)
        if packed:
            computed = self._packed(rows, chosen)
        elif chosen.size <= self.config.count:
            computed = self._by_token(rows, chosen)
        else:
            computed = self._by_expert(rows, chosen)
        return _summed(computed, weights).reshape(y_BTD.shape)

    def _on_shards(
        self, y_BTD: Float[Array, "B T D"], placement: Placement
    ) -> Float[Array, "B T D"]:
        axes = split_by(self.config.count, placement)

        def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
            whole = "router" in jax.tree_util.keystr(path)
            return PartitionSpec() if whole else PartitionSpec(axes)

        rows = placement.along("batch", "none", "model")
        shards = jax.shard_map(
            functools.partial(Experts._of_shard, axes=axes),
            mesh=placement.mesh,
            in_specs=(jax.tree_util.tree_map_with_path(spec, self), rows),
            out_specs=rows,
            check_vma=False,
        )
        return shards(self, y_BTD)

    def _of_shard(
        self, y_BTD: Float[Array, "B T D"], axes: tuple[str, ...]
    ) -> Float[Array, "B T D"]:
        """Return the sum over all shards, of which this one holds only some experts."""
        rows, count = y_BTD.reshape(-1, y_BTD.shape[-1]), self.gate[...].shape[0]
        weights, chosen = self._route(rows)
        chosen = chosen - lax.axis_index(axes) * count
        here = (chosen >= 0) & (chosen < count)
        if chosen.size <= self.config.count:
            out = self._one_by_one(rows, weights, chosen, here)
        else:
            computed = self._by_expert(rows, jnp.where(here, chosen, count))
            out = _summed(jnp.where(here[..., None], computed, 0), weights)
        return lax.psum(out, axes).reshape(y_BTD.shape)

    def _route(self, rows: Float[Array, "n D"]) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
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

    def _one_by_one(
        self,
        rows: Float[Array, "n D"],
        weights: Float[Array, "n k"],
        chosen: Int[Array, "n k"],
        here: Bool[Array, "n k"],
    ) -> Float[Array, "n D"]:
        """Return the weighted sum over the choices that are `here`. No other expert is read."""
        order = jnp.argsort(~here.reshape(-1), stable=True)
        token, expert = order // self.config.per_token, chosen.reshape(-1)[order]
        weight = weights.reshape(-1)[order].astype(rows.dtype)

        def add(i: Array, out: Float[Array, "n D"]) -> Float[Array, "n D"]:
            computed = self._by_token(rows[token[i]][None], expert[i].reshape(1, 1))
            return out.at[token[i]].add(weight[i] * computed[0, 0])

        return lax.fori_loop(0, jnp.sum(here), add, jnp.zeros_like(rows))

    def _by_expert(
        self, rows: Float[Array, "n D"], chosen: Int[Array, "n k"]
    ) -> Float[Array, "n k D"]:
        """Return the outputs of each token's experts, unspecified for those beyond the last."""
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=self.gate[...].shape[0]).astype(jnp.int32)
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
        gate = self._biased(gate, self.gate_bias, expert)
        up = self._biased(up, self.up_bias, expert)
        limit = self.config.swiglu_limit
        if limit is None:
            return activated("silu", gate) * up
        return clipped_swiglu(gate, up, limit, self.config.swiglu_alpha)

    @staticmethod
    def _biased(
        rows: Float[Array, "*tokens E"], bias: nnx.Param | None, expert: Int[Array, "*tokens"]
    ) -> Float[Array, "*tokens E"]:
        return rows if bias is None else rows + bias[...][expert]


def _summed(computed: Float[Array, "n k D"], weights: Float[Array, "n k"]) -> Float[Array, "n D"]:
    return jnp.einsum("nkd,nk->nd", computed, weights.astype(computed.dtype))
