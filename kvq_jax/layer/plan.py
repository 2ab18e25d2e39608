"""One layer of a cache: its static plan, and the state that flows through its functions
(cache/update.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvq_jax.codecs.codec import Codec
from kvq_jax.codecs.facts import CrossLayer
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import ArraySpec, Axis, LayerWeights, LengthsB, Tree
from kvq_jax.types.pytree import describe, pytree

Sides = tuple[Any, ...]  # (keys, values), or one entry for both


def by_side(params: Tree) -> tuple[Tree, Tree]:
    """Split one layer's method parameters into (keys, values). `()` stands for both if neither side
    has any."""
    return params or ((), ())


@pytree
@dataclasses.dataclass(frozen=True)
class LayerState:
    """The state of one layer. `sink`, `ring`, `body` and `stats` are pairs (keys, values), or hold
    one entry for both (`LayerPlan.joint`). Every array has a leading batch axis.

    Attributes:
        sink: [B, K, sink, C], the first tokens' rows in full precision.
        ring: [B, K, recent + block, C], the newest tokens' rows in full precision. Both have
            fewer slots if the capacity has fewer tokens.
        body: the codec's arrays.
        stats: the prompt statistics.
        intact: [B] int32, the body tokens whose codes remain from before a trim (kept_codes.py).
        floor: [B] int32, the first body token that was still held at the last trim. Only of a body
            that wraps around, else None.
    """

    sink: Sides
    ring: Sides
    body: Sides
    stats: Sides
    intact: LengthsB
    floor: LengthsB | None = None


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Static description of one layer: resolved codecs, region sizes and its attention. `heads` is
    K, `head_dim` is H. With `lse`, the attention that functions return has one more channel: the
    logarithm of the sum that the softmax divides by."""

    k: Codec
    v: Codec
    regions: Regions
    heads: int
    head_dim: int
    attention: Attention = PLAIN
    lse: bool = False

    @property
    def joint(self) -> bool:
        """Return True if keys and values are read from the same rows."""
        return self.k.facts.joint

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Return the codec of each entry of the state's fields."""
        return (self.k,) if self.joint else (self.k, self.v)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each entry of the state's fields."""
        return ("kv",) if self.joint else ("k", "v")

    @property
    def row_width(self) -> int:
        """Return the number of channels of a token's widest cached row, over all heads."""
        return max(codec.facts.row_width(self.heads, self.head_dim) for codec in self.codecs)

    @property
    def cross_layer(self) -> CrossLayer | None:
        """Return how the layer builds on the one below it, or None if it does not."""
        return self.k.facts.cross_layer

    def dealt(self, shards: int, axis: str | None) -> LayerPlan:
        """Return the plan of a layer whose body is dealt out to shards along a mesh axis, but for
        one that wraps around."""
        if shards == 1 or self.regions.wraps:
            return self
        regions = dataclasses.replace(self.regions, shards=shards, axis=axis)
        return dataclasses.replace(self, regions=regions)

    def share(self, parts: int) -> LayerPlan:
        """Return the plan of 1 / parts of the KV heads."""
        return self if parts == 1 else dataclasses.replace(self, heads=self.heads // parts)

    @property
    def quantizes(self) -> bool:
        """Return True if the layer stores codes. A skipped layer does not, nor does one whose rows
        the method's options leave as they are."""
        return not all(codec.facts.exact for codec in self.codecs)

    def from_weights(self, weights: LayerWeights) -> tuple[Tree, Tree]:
        """Return the parameters (keys, values) that follow from the layer's weights, `()` for a
        side that takes none."""
        k = self.k.learning.from_weights(weights)
        return k, k if self.joint else self.v.learning.from_weights(weights)

    def readable(self, bodies: Sides, carry: Tree) -> Sides:
        """Return the arrays that attention reads: the bodies, or the accumulator."""
        return (carry,) if self.cross_layer else bodies

    def readable_specs(self, side: int, batch: int, heads: int, tokens: int) -> Tree:
        if self.cross_layer:
            return self.cross_layer.accumulator(batch, tokens)
        return self.codecs[side].body(batch, heads, tokens)

    def axes(self, batch: int, dtype: DTypeLike) -> LayerState:
        """Describe every array of this layer: the tree of `ArraySpec` from which allocation, byte
        counts and shardings follow."""

        def window(slots: int) -> Sides:
            rows = (codec.facts.row_axes(self.heads, self.head_dim) for codec in self.codecs)
            sequences, tokens = Axis("batch", batch), Axis("tokens", slots)
            return tuple(
                ArraySpec((sequences, heads, tokens, channels), jnp.dtype(dtype).name)
                for heads, channels in rows
            )

        tokens = self.regions.held_capacity * self.regions.shards
        bodies = tuple(codec.body(batch, self.heads, tokens) for codec in self.codecs)
        stats = tuple(codec.statistics.spec(batch, self.heads) for codec in self.codecs)
        if self.regions.wraps:
            bodies = jax.tree.map(lambda spec: spec.wrapped, bodies)
        counts = ArraySpec((Axis("batch", batch),), "int32")
        return describe(
            LayerState,
            sink=window(self.regions.sink_slots),
            ring=window(self.regions.ring_slots),
            body=bodies,
            stats=stats,
            intact=counts,
            floor=counts if self.regions.wraps else None,
        )

    def layout(self, batch: int, dtype: DTypeLike) -> LayerState:
        """Return the ShapeDtypeStructs of `axes`."""
        return jax.tree.map(lambda spec: spec.struct, self.axes(batch, dtype))

    def init(self, batch: int, dtype: DTypeLike) -> LayerState:
        """Return the state of an empty layer."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.layout(batch, dtype))
        return dataclasses.replace(
            zeros, stats=tuple(c.statistics.initial(batch, self.heads) for c in self.codecs)
        )
