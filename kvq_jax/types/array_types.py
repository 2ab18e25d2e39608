"""The legend: one letter per dimension, one sense per word, in every signature of this project.

Dimensions
----------
    B  batch rows (sequences)          N  query heads            D  model width
    T  new tokens of this call         K  key/value heads        L  layers
    S  cache capacity in tokens        G  N // K                 V  vocabulary
    H  head dimension                  C  width of a cached row

Words
-----
    row        the vector that a cache stores for one token and one head: K after or before RoPE, V
    group      the elements that share one scale (and one zero point)
    block      the tokens that leave the recent window together
    chunk      the tokens that the streaming attention reads in one step of its loop
    plane      the W neighbouring channels that one bit field of the packed words holds
    position   index of a token in its sequence. Rows are right-padded, so index == position
    valid      True for a real token, False for padding

Axes
----
Every array that is kept (caches, prompt statistics, method parameters, weights) is described by an
`ArraySpec`, whose axes have these names. Nothing is inferred from shapes.

    batch      sequences                         model   the model's width, of the residual stream
    kv_heads   key/value heads                   heads   query heads
    tokens     cached tokens, or window slots    mlp     the width inside an MLP
    channels   entries of a cached row           vocab   tokens that a model knows
    pairs      RoPE pairs of a head              experts of a mixture
                                                 none    anything else: words of a row, slots of a
                                                         token, entries of a table

An axis keeps its name if neighbours share an entry, and `per` counts them. A scale of groups over
32 tokens has the axes (batch, kv_heads, tokens per 32, channels), one of groups over 32 channels
(batch, kv_heads, channels per 32, tokens), and packed words of which n tokens share a row have an
axis of tokens per n. If one thing has several entries side by side, `each` counts them: a
projection's output runs along kv_heads, with H entries for each. An axis of heads that the model
does not have (a layer's input cached as one row) is called "none".

RoPE pairs are the half-split pairs (i, i + H/2) of Hugging Face's Llama.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvq_jax.types.pytree import pytree
from kvq_jax.types.rope import Rope

Tree: TypeAlias = Any  # a pytree whose structure a method defines

QueryBNTH: TypeAlias = Float[Array, "B N T H"]
RowsBKTH: TypeAlias = Float[Array, "B K T H"]
# K or V, or the rows from which they are rebuilt
CachedRows: TypeAlias = Float[Array, "B heads T C"]
# the types that a caller may pass for tokens or lengths
Integers: TypeAlias = ArrayLike | Sequence[int] | Sequence[Sequence[int]]
LengthsB: TypeAlias = Int[Array, "B"]
PositionsBT: TypeAlias = Int[Array, "B T"]
ValidBT: TypeAlias = Bool[Array, "B T"]


AxisName = Literal[
    "batch",
    "kv_heads",
    "tokens",
    "channels",
    "pairs",
    "model",
    "heads",
    "mlp",
    "experts",
    "vocab",
    "none",
]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One named axis of an array.

    Attributes:
        name: the things that it runs along.
        count: the number of these things.
        per: neighbours that share entries.
        each: entries side by side for every `per` things.
    """

    name: AxisName
    count: int
    per: int = 1
    each: int = 1

    @property
    def size(self) -> int:
        """Return the number of entries along the axis."""
        return self.count // self.per * self.each


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The axes and the dtype of one array, from which its shape, its bytes and its shardings
    follow.

        batch, heads = Axis("batch", B), Axis("kv_heads", K)
        tokens, channels = Axis("tokens", S, per=32), Axis("channels", H)
        ArraySpec((batch, heads, tokens, channels), "float16")    # [B, K, S/32, H]

    It is a leaf of pytrees. A tree of descriptions has the structure of the tree of arrays that it
    describes (`pytree.describe`).

    Attributes:
        axes: the axes, outermost first. Only "none" may name several of them.
        dtype: the name of the array's dtype.
    """

    axes: tuple[Axis, ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        return tuple(axis.size for axis in self.axes)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Return the shape and the dtype of the array that is allocated."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def grows(self) -> bool:
        """Return True if the array grows with the tokens of a cache's body, which is dealt out to
        shards. Windows do not grow."""
        return False

    @property
    def names(self) -> tuple[AxisName, ...]:
        """Return the names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    def axis(self, name: AxisName) -> int:
        """Return the index of the axis of this name. Raise ValueError if there is none."""
        return self.names.index(name)

    def __getitem__(self, name: AxisName) -> Axis:
        return self.axes[self.axis(name)]

    def along(
        self, name: AxisName, vector: Shaped[Array | np.ndarray, " n"]
    ) -> Shaped[Array | np.ndarray, "..."]:
        """Return a vector laid along the axis of this name, ready to be broadcast against the
        array."""
        return vector.reshape(
            [-1 if axis == self.axis(name) else 1 for axis in range(len(self.axes))]
        )

    def renamed(self, old: AxisName, new: AxisName) -> ArraySpec:
        """Return the same description with the axis `old` renamed to `new`."""
        return dataclasses.replace(
            self,
            axes=tuple(dataclasses.replace(a, name=new) if a.name == old else a for a in self.axes),
        )


# a weight, or a description of it
ArrayOrSpec: TypeAlias = Array | jax.ShapeDtypeStruct | ArraySpec


@runtime_checkable
class ModelDims(Protocol):
    """The dimensions of a model that a cache needs. `kvq_models.LlamaConfig`, `CacheDims` and a
    Hugging Face Llama config have them.

    Attributes:
        num_hidden_layers: L, the number of layers.
        num_attention_heads: N, the number of query heads.
        num_key_value_heads: K, the number of key/value heads.
        head_dim: H, the channels of a head.
        hidden_size: D, the width of the model.
    """

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


@pytree
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Everything about T new tokens that one layer can offer to a cache method.

    Rows that a caller does not have (tests of a method that reads only keys and values) may be
    None.

    Attributes:
        x: [B, T, D], the input of the attention projections, after RMSNorm.
        q_pre: [B, N, T, H], queries before RoPE, after bias and QK-norm.
        q_rot: [B, N, T, H], queries after RoPE.
        k_pre: [B, K, T, H], keys before RoPE, after bias and QK-norm.
        k_rot: [B, K, T, H], keys after RoPE.
        v: [B, K, T, H], values.
        positions: [B, T] int32, the index of each token in its sequence.
        valid: [B, T] bool, True for real tokens, False for padding.
        rope: the model's rotation, to apply to rows that were cached before RoPE.
        residual: [B, T, D], the residual stream from which x was normalized.
        sinks: [N], the learned logits of a layer whose attention has sinks.
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
    sinks: Float[Array, " N"] | None = None


@pytree
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer that a cache method may build on: everything between the residual
    stream and the keys and values.

        x     = norm(residual, input_norm)
        k_pre = norm_heads(x k_kernel + k_bias, k_norm)
        v     = x v_kernel + v_bias

    Attributes:
        k_kernel: [D, K * H], the key projection.
        v_kernel: [D, K * H], the value projection.
        input_norm: [D], the scale of the RMSNorm before the projections.
        norm_eps: [] fp32, the epsilon of the norms.
        k_bias: [K * H], the bias of the key projection, or None.
        v_bias: [K * H], the bias of the value projection, or None.
        k_norm: [H], the scale of the keys' norm, or None without QK-norm.
    """

    k_kernel: Float[ArrayOrSpec, "D KH"]
    v_kernel: Float[ArrayOrSpec, "D KH"]
    input_norm: Float[ArrayOrSpec, " D"]
    norm_eps: Float[ArrayOrSpec, ""]
    k_bias: Float[ArrayOrSpec, " KH"] | None = None
    v_bias: Float[ArrayOrSpec, " KH"] | None = None
    k_norm: Float[ArrayOrSpec, " H"] | None = None
