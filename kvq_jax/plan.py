"""What one layer of a cache is: the static plan, and the state that flows through its functions (layer.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvq_jax.array_types import Tree
from kvq_jax.codec import Codec
from kvq_jax.regions import Regions

Pair = tuple[Any, Any]  # (keys, values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """Each field is a pair (keys, values); every array has a leading batch axis.

    sink [B, K, sink, C] and ring [B, K, recent + block, C] hold exact rows, body the codec's arrays, stats what the prompt fixed.
    """

    sink: Pair
    ring: Pair
    body: Pair
    stats: Pair


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Static description of one layer's cache: resolved codecs and region sizes. heads = K, head_dim = H."""

    k: Codec
    v: Codec
    regions: Regions
    heads: int
    head_dim: int

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.k, self.v

    def layout(self, batch: int, dtype: DTypeLike) -> LayerState:
        """The ShapeDtypeStructs of this layer: what allocation, byte counts and tests derive from."""

        def window(slots: int) -> Pair:
            struct = jax.ShapeDtypeStruct((batch, self.heads, slots, self.head_dim), jnp.dtype(dtype))
            return struct, struct

        def body(codec: Codec) -> Tree:
            return jax.tree.map(lambda leaf: leaf.struct, codec.body(batch, self.heads, self.regions.body_capacity))

        stats = jax.eval_shape(lambda: tuple(c.initial_statistics(batch, self.heads) for c in self.codecs))
        return LayerState(window(self.regions.sink_slots), window(self.regions.ring_slots), (body(self.k), body(self.v)), stats)

    def init(self, batch: int, dtype: DTypeLike) -> LayerState:
        """An empty layer."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.layout(batch, dtype))
        return dataclasses.replace(zeros, stats=tuple(c.initial_statistics(batch, self.heads) for c in self.codecs))
