"""The full-precision cache as a method: the body holds the rows themselves."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvq_jax.arrays.stored import BodySpec
from kvq_jax.codecs.codec import Codec, Side, TokensAt, side_rows
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.kernels import Kernels, of_rows
from kvq_jax.methods.base import Method, Windows
from kvq_jax.types.array_types import Axis, CachedRows, LayerInputs, ModelDims, Tree


@dataclasses.dataclass(frozen=True)
class DenseCodec(Codec):
    """x^ = x: rows are stored as `dtype`, without quantization. Exact if the model has that
    dtype."""

    side: Side
    channels: int
    dtype: str

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return side_rows(inputs, self.side)

    def body(self, batch: int, heads: int, tokens: int) -> BodySpec:
        axes = (
            Axis("batch", batch),
            Axis("kv_heads", heads),
            Axis("tokens", tokens),
            Axis("channels", self.channels),
        )
        return BodySpec(axes, self.dtype)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        return rows.astype(jnp.dtype(self.dtype))

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return body

    @property
    def facts(self) -> Facts:
        return Facts(exact=True)

    @property
    def kernels(self) -> Kernels:
        return of_rows(self.channels, self.dtype)


@dataclasses.dataclass(frozen=True)
class Dense(Method):
    """Keys and values in the model's dtype, without options or windows."""

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = (
        "keys and values in full precision, in the model's dtype (the baseline)"
    )
    source: ClassVar[str] = "-"
    exact: ClassVar[bool] = True
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=1)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        return DenseCodec(side, dims.head_dim, dtype)
