"""The legend: one letter per dimension, one sense per word, in every signature of this project.

Dimensions
----------
    B  batch rows (sequences)          N  query heads            D  model width
    T  new tokens of this call         K  key/value heads        L  layers
    S  cache capacity in tokens        G  N // K                 V  vocabulary
    H  head dimension                  C  width of a cached row

Words
-----
    row        what a cache stores for one token and one head: K post-RoPE, K pre-RoPE or V
    group      the elements that share one scale (and one zero point)
    block      the tokens that leave the exact window together
    chunk      the tokens that the streaming attention reads in one step of its loop
    plane      the W neighbouring channels that one bit field of the packed words holds
    position   index of a token in its sequence; rows are right-padded, so index == position
    valid      True where a token is real, False where it is padding

RoPE pairs are the half-split pairs (i, i + H/2) of Hugging Face's Llama.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.rope import Rope

Tree: TypeAlias = Any  # a pytree whose structure a method defines

QueryBNTH: TypeAlias = Float[Array, "B N T H"]
RowsBKTH: TypeAlias = Float[Array, "B K T H"]
LengthsB: TypeAlias = Int[Array, "B"]
PositionsBT: TypeAlias = Int[Array, "B T"]
ValidBT: TypeAlias = Bool[Array, "B T"]


class ModelDims(Protocol):
    """What a cache needs to know of a model; `kvq_models.LlamaConfig` and a Hugging Face Llama config both have it."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Everything about T new tokens that one layer can offer to a cache method.

    Shapes: x [B, T, D]; q_pre, q_rot [B, N, T, H]; k_pre, k_rot, v [B, K, T, H]; positions [B, T] int32; valid [B, T] bool.
    `x` is the input of the attention projections, after RMSNorm. `*_pre` is before RoPE (after bias and QK-norm), `*_rot` after it.
    `rope` re-applies the same rotation to rows that were cached before RoPE. `residual` [B, T, D] is the residual stream that x was
    normalized from. Rows that a caller does not have (tests of a method that reads only keys and values) may be None.
    """

    x: Float[Array, "B T D"] | None
    q_pre: QueryBNTH | None
    q_rot: QueryBNTH
    k_pre: RowsBKTH | None
    k_rot: RowsBKTH
    v: RowsBKTH
    positions: PositionsBT
    valid: ValidBT
    rope: Rope | None
    residual: Float[Array, "B T D"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """What of one layer's weights a cache method may build on: everything between the residual stream and the keys and values.

        x = norm(residual, input_norm),   k_pre = norm_heads(x k_kernel + k_bias, k_norm),   v = x v_kernel + v_bias

    Shapes: kernels [D, K * H], biases [K * H] or None, input_norm [D], k_norm [H] or None (no QK-norm), norm_eps [] fp32.
    """

    k_kernel: Float[Array, "D KH"]
    v_kernel: Float[Array, "D KH"]
    input_norm: Float[Array, " D"]
    norm_eps: Float[Array, ""]
    k_bias: Float[Array, " KH"] | None = None
    v_bias: Float[Array, " KH"] | None = None
    k_norm: Float[Array, " H"] | None = None
