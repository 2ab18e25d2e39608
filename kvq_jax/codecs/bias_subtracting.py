"""Keys whose constant part is known: k_proj's bias is subtracted before a codec sees them, and its
share of the scores is added exactly.

    k_pre = x W_k + b,   k_rot = R_p k_pre
    rows  = k_pre - b,   or after RoPE  k_rot - R_p b = R_p (k_pre - b)

    q . R_p b = a sum_i cos(p w_i) A_i + sin(p w_i) B_i
    A_i = q_i b_i + q_j b_j,   B_i = q_j b_i - q_i b_j,   j = i + H/2

with i over the RoPE pairs, p the key's position, w and a of rope.py. A and B belong to a query and
are computed once. Cosines and sines of a chunk's positions serve all heads. So scores cost one
product [rows of all heads, H] x [H, C] more, and no key is made for any head.

The channels of a group share a scale, and one channel with a constant of 100 makes it coarse for
all of them (Qwen2 and Qwen2.5 have such biases). Without the bias, codes do not depend on it at
all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning, required
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.codecs.wrapper import Wrapper
from kvq_jax.types.array_types import CachedRows, LayerInputs, LayerWeights, RowsBKTH, Tree
from kvq_jax.types.rope import Rope, cosines_and_sines, rotate

OPTION = "subtract_bias=true"


@dataclasses.dataclass(frozen=True)
class BiasSubtracting(Wrapper):
    """The key codec `inner`, applied to keys without their bias. Windows hold rows without it too,
    and `vectors` restores it.

    Parameters: the parameters of `inner`, and `bias` [K * H], the model's own array. Exact to fp32
    rounding of the bias's share of the scores (relative 2^-24 of |q| |b|), as in the model.
    """

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return self.inner.rows(_without_bias(params), _unbiased(params, inputs))

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        return self.inner.quantize(_without_bias(params), stats, rows, at)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return self.inner.dequantize(_without_bias(params), stats, body)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        keys = self.inner.vectors(_without_bias(params), rows, positions, rope)
        bias = rotated_bias(params, keys.shape[-1], positions, rope)
        return (keys.astype(jnp.float32) + bias).astype(keys.dtype)

    def query(
        self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]
    ) -> tuple[Tree, Float[Array, "B K R H"]]:
        """Return the query of `inner`, and A and B side by side."""
        first, second = jnp.split(q.astype(jnp.float32), 2, axis=-1)
        b_first, b_second = jnp.split(bias_of(params, q.shape[-1])[None, :, None], 2, axis=-1)
        turning = [first * b_first + second * b_second, second * b_first - first * b_second]
        query = self.inner.query(_without_bias(params), stats, q)
        return query, jnp.concatenate(turning, axis=-1)

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        inner_query, turning = query
        angles = cosines_and_sines(positions, _required_rope(rope))
        table = jnp.concatenate(angles, axis=-1)[:, None]  # [B, 1, C, H]
        batch, heads, rows, head_dim = turning.shape
        # TF32 would keep 11 bits of a term that may be hundreds
        constant = dot_rows(
            turning.reshape(batch, 1, heads * rows, head_dim), table, lax.Precision.HIGHEST
        )
        scores = self.inner.scores(_without_bias(params), stats, inner_query, body, positions, rope)
        return scores + constant.reshape(batch, heads, rows, -1)

    @property
    def statistics(self) -> Statistics:
        return dataclasses.replace(self.inner.statistics, of=self._statistics)

    @property
    def facts(self) -> Facts:
        # No code depends on the bias, so none can be spoiled by it.
        return dataclasses.replace(
            self.inner.facts,
            form="other",
            channel_group_bits=None,
            mantissa_bits=None,
            token_group=None,
        )

    @property
    def kernels(self) -> Kernels:
        return unserved(f"{OPTION} adds the bias's share to the scores, which no kernel does")

    @property
    def learning(self) -> Learning:
        learning: Learning = self.inner.learning
        return dataclasses.replace(
            learning,
            weights=self._from_weights,
            bias=bias_of,
            narrowed=(),  # for kernels, and none reads these keys
            key=f"{learning.key},{OPTION}" if learning.key else OPTION,
        )

    def describe(self) -> dict[str, Any]:
        return self.inner.describe() | {"subtract_bias": True}

    def _statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        return self.inner.statistics.of(_without_bias(params), _unbiased(params, inputs))

    def _from_weights(self, weights: LayerWeights) -> Tree:
        check_bias(weights)
        return {**(self.inner.learning.from_weights(weights) or {}), "bias": weights.k_bias}


def check_bias(weights: LayerWeights) -> None:
    """Raise ValueError, in one line, if the layer's keys hold no bias that could be subtracted."""
    if weights.k_bias is None:
        raise ValueError(f"{OPTION}: this model's key projection has no bias; leave the option out")
    if weights.k_norm is not None:
        raise ValueError(
            f"{OPTION}: this model normalizes keys after their bias (QK-norm), so no constant part"
            " is known; leave it out"
        )


def bias_of(params: Tree, head_dim: int) -> Float[Array, "K H"]:
    """Return the bias of each KV head, fp32. Raises ValueError if there are no parameters."""
    params = required(params, f"{OPTION} needs the biases of key projections")
    return params["bias"].astype(jnp.float32).reshape(-1, head_dim)


def rotated_bias(
    params: Tree, head_dim: int, positions: Int[Array, "#B T"], rope: Rope | None
) -> Float[Array, "B K T H"]:
    """Return R_p b for each position, fp32."""
    bias = bias_of(params, head_dim)[None, :, None]
    return rotate(
        jnp.broadcast_to(bias, (positions.shape[0], bias.shape[1], positions.shape[1], head_dim)),
        positions,
        _required_rope(rope),
    )


def _unbiased(params: Tree, inputs: LayerInputs) -> LayerInputs:
    """Return the same inputs with keys as if the projection had no bias, in the dtype of the
    keys."""
    head_dim, dtype = inputs.k_rot.shape[-1], inputs.k_rot.dtype
    bias = rotated_bias(params, head_dim, inputs.positions, inputs.rope)
    k_rot = (inputs.k_rot.astype(jnp.float32) - bias).astype(dtype)
    k_pre = inputs.k_pre
    if k_pre is not None:
        bias = bias_of(params, head_dim)[None, :, None]
        k_pre = (k_pre.astype(jnp.float32) - bias).astype(dtype)
    return dataclasses.replace(inputs, k_rot=k_rot, k_pre=k_pre)


def _without_bias(params: Tree) -> Tree:
    """Return the inner codec's parameters."""
    return {name: value for name, value in params.items() if name != "bias"} if params else ()


def _required_rope(rope: Rope | None) -> Rope:
    if rope is None:
        raise ValueError(
            f"{OPTION} needs the model's rope, by which the bias is rotated: it is None"
        )
    return rope
