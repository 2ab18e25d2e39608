"""Count the bytes and bits of caches from their arrays."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvq_jax.arrays.stored import load_body
from kvq_jax.cache.cache import Cache, check_cache, dims_of, layout, plans_for
from kvq_jax.cache.moving import move
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.attention import of_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import ModelDims
from kvq_jax.types.integers import integer, positive


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays in a tree. Exact.

    Args:
        tree: a cache, a layer, or the structs or descriptions of either.
    """
    return sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )


def dense_nbytes(
    config: ModelDims, batch: int, capacity: int, dtype: DTypeLike = "bfloat16"
) -> int:
    """Return the bytes of unquantized keys and values: 2 * L * B * K * S * H * itemsize, with the
    window in place of S in layers that have a shorter one, and a layer's own K and H. Exact.

    Args:
        config: the model's config, or its `CacheDims`.
        batch: B, the number of sequences.
        capacity: S, the tokens of each sequence.
        dtype: the dtype of keys and values, whatever the config's is.

    Raises:
        ValueError: in one line, if the batch or the capacity is not an integer of at least 1.
    """
    batch, capacity = positive("batch", batch), positive("capacity", capacity)
    d = dims_of(config)
    elements = 0
    for layer in range(d.num_hidden_layers):
        window, own = of_layer(d.attention, layer).window or capacity, d.at(layer)
        elements += min(window, capacity) * own.num_key_value_heads * own.head_dim
    return 2 * batch * elements * jnp.dtype(dtype).itemsize


def bits_per_element(
    spec: CacheSpec | str, config: ModelDims, capacity: int, dtype: DTypeLike = "bfloat16"
) -> float:
    """Return the stored bits of a whole cache divided by the 2 * L * K * S * H elements that it
    stands for, fewer in layers with windows (`dense_nbytes`). Exact, counted from shapes.

    Windows, scales, padding and statistics are included.

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.
        capacity: S, in tokens.
        dtype: the dtype of the windows' full-precision rows. It is bfloat16 unless you pass
            another, whatever the config's is: pass that of `init_cache` for the bits of its cache.

    Raises:
        ValueError: as `init_cache`.
    """
    elements = dense_nbytes(config, 1, capacity, "uint8")
    return 8 * nbytes(layout(spec, config, 1, capacity, dtype)) / elements


def body_bits_per_element(
    spec: CacheSpec | str, config: ModelDims, capacity: int | None = None
) -> float:
    """Return the stored bits of a body element, averaged over layers and sides. Papers call this
    average bits, without windows. Exact, counted from the arrays of whole blocks.

    Elements in full precision count as 16 bits, whatever the model's dtype.

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.
        capacity: S in tokens. Layers then count in proportion to the body tokens that they have
            room for, fewer in layers with sliding windows. Default: all layers count alike.

    Raises:
        ValueError: as `init_cache`.
    """
    bits = elements = 0
    plans = plans_for(spec, config, "bfloat16", 1 if capacity is None else capacity)
    for plan, layers in Counter(plans).items():
        tokens = plan.regions.block * 32
        counted = layers * (1 if capacity is None else max_blocks(plan))
        for codec in plan.codecs:
            bits += counted * 8 * nbytes(codec.body(1, plan.heads, tokens))
        elements += counted * 2 * plan.heads * tokens * plan.head_dim
    return bits / elements


def max_blocks(plan: LayerPlan) -> int:
    """Return the blocks that the body of a layer has room for, at least 1."""
    return max(1, plan.regions.held_capacity // plan.regions.block)


def unmet_options(cache: Cache) -> tuple[str, ...]:
    """Return a sentence for each option that the layers of a cache are too small to satisfy, each
    sentence once.

    Args:
        cache: a cache, or its layout.

    Raises:
        ValueError: in one line, if it is not a cache, or was consumed.
    """
    check_cache(cache)
    sides = ((plan.heads, codec.facts.unmet) for plan in cache.plans for codec in plan.codecs)
    sentences = (unmet(heads) for heads, unmet in sides if unmet)
    return tuple(dict.fromkeys(sentence for sentence in sentences if sentence))


def outlier_fraction(spec: CacheSpec | str, config: ModelDims) -> float:
    """Return the share of the body's elements that have a slot for an outlier, averaged over layers
    and sides.

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.

    Raises:
        ValueError: as `init_cache`.
    """
    sides = [(plan, codec) for plan in plans_for(spec, config) for codec in plan.codecs]
    return sum(
        codec.facts.outlier_slots(plan.heads) / (plan.heads * plan.head_dim)
        for plan, codec in sides
    ) / len(sides)


@dataclasses.dataclass(frozen=True)
class OutlierTotals:
    """The number of outliers of some tokens.

    Attributes:
        kept: outliers that have a slot.
        dropped: outliers that found no slot.
    """

    kept: int = 0
    dropped: int = 0

    def __add__(self, other: OutlierTotals) -> OutlierTotals:
        return OutlierTotals(self.kept + other.kept, self.dropped + other.dropped)

    @property
    def share_dropped(self) -> float:
        """Return the share of all outliers that found no slot, 0 if there are no outliers."""
        return self.dropped / max(1, self.kept + self.dropped)


def outlier_totals(cache: Cache) -> tuple[dict[str, OutlierTotals], ...]:
    """Return the outliers of each side among the live tokens of a cache's body.

    Args:
        cache: the cache, on any placement.

    Returns:
        A dictionary for each layer, from "k", "v", or the one side of methods that cache something
        else, to its totals. Sides without slots for outliers are left out.

    Raises:
        ValueError: if the cache was consumed.
    """
    check_cache(cache)
    layers = []
    if cache.placement is not None:
        cache = move(cache, None)  # body arrays in the order of tokens
    for plan, layer in zip(cache.plans, cache.layers, strict=True):
        by_side, regions = {}, plan.regions
        for side, codec, stored in zip(plan.names, plan.codecs, layer.body, strict=True):
            if codec.facts.outliers:
                body = load_body(codec.body(1, plan.heads, plan.regions.block), stored)
                counts = codec.facts.outliers.counts(body)
                runs = counts.kept.shape[1]
                # the first token of each run, of products that int32 may not hold
                first = np.arange(runs, dtype=np.int64) * regions.held_capacity // max(1, runs)
                in_body = regions.aged_tokens(cache.lengths)
                live = (
                    first.astype(np.int32)[None]
                    < jnp.minimum(in_body, regions.read_capacity)[:, None]
                )
                by_side[side] = OutlierTotals(
                    *(int(jnp.sum(jnp.where(live, count, 0))) for count in counts)
                )
        layers.append(by_side)
    return tuple(layers)


def dropped_outliers(cache: Cache) -> tuple[int, int]:
    """Return (outliers that found no slot, outliers that have one) among the live tokens of a
    cache's body, summed over layers and sides.

    Args:
        cache: the cache.
    """
    total = sum(
        (side for layer in outlier_totals(cache) for side in layer.values()), OutlierTotals()
    )
    return total.dropped, total.kept


def quantized_tokens(cache: Cache, tokens: int) -> int:
    """Return the number of the first `tokens` tokens that are quantized in some layer.

    Args:
        cache: a cache, or its layout.
        tokens: the number of tokens in a row. Those past the capacity are not stored.

    Raises:
        ValueError: in one line, if `cache` is not a cache, or `tokens` is not a number of tokens.
    """
    check_cache(cache)
    count = integer(tokens, 0)
    if count is None:
        raise ValueError(f"{tokens=} must be an integer of at least 0")
    stored = min(count, cache.capacity)
    return max(
        (plan.regions.aged_tokens(stored) for plan in cache.plans if plan.quantizes), default=0
    )


@dataclasses.dataclass(frozen=True)
class Component:
    """The bytes of one named part of a cache, in one layer or in all of them.

    Attributes:
        side: "k", "v", the one side of a joint body, or "-".
        name: the part, such as "words", "scale" or "ring".
        bytes: its bytes.
    """

    side: str
    name: str
    bytes: int


def components(cache: Cache) -> tuple[Component, ...]:
    """Return the bytes of each part of a cache. Their sum is `nbytes(cache)`. Exact.

    The parts of a side are its windows, each kind of body array (packed words, scales, zero points,
    full-precision rows) and the prompt statistics. "lengths" are a row's token counts.

    Args:
        cache: a cache, or its layout.

    Raises:
        ValueError: in one line, if it is not a cache, or was consumed.
    """
    check_cache(cache)
    totals = {("-", "lengths"): nbytes(cache.lengths)}
    for part in (part for layer in layer_components(cache) for part in layer):
        totals[part.side, part.name] = totals.get((part.side, part.name), 0) + part.bytes
    counts = totals.pop(("-", "lengths"))
    rows = [Component(side, name, size) for (side, name), size in sorted(totals.items())]
    return (*rows, Component("-", "lengths", counts))


def layer_components(cache: Cache) -> tuple[tuple[Component, ...], ...]:
    """Return the `components` of each layer. The number of live tokens belongs to no layer."""
    return tuple(
        _components(plan, layer) for plan, layer in zip(cache.plans, cache.layers, strict=True)
    )


def _components(plan: LayerPlan, layer: LayerState) -> tuple[Component, ...]:
    counts = nbytes((layer.intact, layer.floor))
    totals: dict[tuple[str, str], int] = {("-", "lengths"): counts}
    for field in ("sink", "ring", "body", "stats"):
        for side, tree in zip(plan.names, getattr(layer, field), strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = field if field != "body" else _body_name(path)
                totals[side, name] = totals.get((side, name), 0) + nbytes(leaf)
    return tuple(Component(side, name, size) for (side, name), size in sorted(totals.items()))


def _body_name(path: tuple[Any, ...]) -> str:
    names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
    return names[0] if names else "rows"
