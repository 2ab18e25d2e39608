"""Move a cache from one placement to another, through the host, array by array. A file holds the
same bytes as one device.

On one device the body's blocks are in the order of tokens. On D shards of tokens each shard's
blocks are together, and blocks without a token fill the last deal:

    order     block 0, 1, 2, ...
    dealt     block 0, D, 2 D, ...  |  1, D + 1, ...  |  ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.cache import Cache, axes, check_cache, shardings
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.layer.regions import Regions
from kvq_jax.placement.placement import Placement
from kvq_jax.placement.processes import fetched
from kvq_jax.types.array_types import ArraySpec

Reorder = Callable[[Any], np.ndarray]  # array -> reordered array
# (description of one block, regions, array) -> reordered array
ReorderBody = Callable[[ArraySpec, Regions, np.ndarray], np.ndarray]


def move(cache: Cache, placement: Placement | None) -> Cache:
    """Return the same cache on the devices of a placement, bit for bit. The host holds one array at
    a time.

    Args:
        cache: the cache, on any placement.
        placement: the new placement, or None for one device.

    Raises:
        ValueError: in one line, if the method cannot have the placement, or the cache was consumed.
    """
    check_cache(cache)
    described = axes(cache.spec, cache.dims, cache.batch, cache.capacity, cache.dtype, placement)
    leaves = zip(
        orders(cache),
        deals(cache, placement),
        placers(described),
        jax.tree.leaves(cache),
        strict=True,
    )
    return jax.tree.unflatten(
        jax.tree.structure(described),
        [place(deal(order(leaf))) for order, deal, place, leaf in leaves],
    )


def orders(cache: Cache) -> list[Reorder]:
    """Return, for each array of a cache, the function that fetches it to the host in the order of
    tokens. Every process gets the whole array."""
    return [
        lambda array, of=of: of(fetched(array))
        for of in _for_bodies(cache, cache.placement, _ordered)
    ]


def deals(cache: Cache, placement: Placement | None) -> list[Reorder]:
    """Return, for each array of a cache or its layout, the function that deals it out, from the
    order of tokens, as a placement asks."""
    return _for_bodies(cache, placement, _dealt)


def placers(described: Cache) -> list[Callable[[np.ndarray], jax.Array]]:
    """Return, for each array of a described cache, the function that brings it from the host to the
    devices that hold it."""
    if described.placement is None:
        return [jnp.asarray] * len(jax.tree.leaves(described))
    return [
        lambda host, sharding=sharding: jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index]
        )
        for sharding in jax.tree.leaves(shardings(described, described.placement))
    ]


def _for_bodies(cache: Cache, placement: Placement | None, reorder: ReorderBody) -> list[Reorder]:
    """Return a function for each array: `reorder` for body arrays that a placement deals out, the
    identity for others."""
    described = axes(cache.spec, cache.dims, cache.batch, cache.capacity, cache.dtype, placement)

    def of_layer(plan: LayerPlan, layer: Any) -> Any:
        def reordering(block: ArraySpec) -> Reorder:
            return lambda array: reorder(block, plan.regions, array)

        whole = jax.tree.map(lambda _: np.asarray, layer)
        if plan.regions.shards == 1:
            return jax.tree.leaves(whole)
        blocks = tuple(codec.body(1, 1, plan.regions.block) for codec in plan.codecs)
        bodies = jax.tree.map(reordering, blocks)
        # the spare place of a cut block's codes is another one
        intact = functools.partial(_whole_blocks, plan.regions.block)
        return jax.tree.leaves((whole.sink, whole.ring, bodies, whole.stats, intact))

    layers = zip(described.plans, described.layers, strict=True)
    functions = [function for plan, layer in layers for function in of_layer(plan, layer)]
    return [*functions, np.asarray]


def _whole_blocks(block: int, intact: np.ndarray) -> np.ndarray:
    return np.asarray(intact) // block * block


def _ordered(block: ArraySpec, regions: Regions, array: np.ndarray) -> np.ndarray:
    """Return a body array in the order of tokens, from one that is dealt out. `block` describes the
    array of one block."""
    axis, entries = block.axis("tokens"), block["tokens"].size
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    dealt = array.reshape(*before, regions.shards, -1, entries, *after)
    ordered = np.swapaxes(dealt, axis, axis + 1).reshape(array.shape)
    live = slice(regions.body_capacity // regions.block * entries)
    return np.ascontiguousarray(ordered[(slice(None),) * axis + (live,)])


def _dealt(block: ArraySpec, regions: Regions, array: np.ndarray) -> np.ndarray:
    """Return a body array dealt out to shards, from one in the order of tokens: the inverse of
    `_ordered`, with zeros for missing blocks."""
    axis, entries = block.axis("tokens"), block["tokens"].size
    missing = regions.held_capacity * regions.shards // regions.block * entries - array.shape[axis]
    whole = np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    before, after = whole.shape[:axis], whole.shape[axis + 1 :]
    ordered = whole.reshape(*before, -1, regions.shards, entries, *after)
    return np.ascontiguousarray(np.swapaxes(ordered, axis, axis + 1).reshape(whole.shape))
