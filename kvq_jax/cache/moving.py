"""A cache from one placement to another, through the host, array by array: what a file holds and
what one device holds are the same bytes.

On one device the body's blocks stand in the order of tokens. On D shards of tokens each shard's
blocks stand together, and blocks without a token fill the last deal:

    order     block 0, 1, 2, ...
    dealt     block 0, D, 2 D, ...  |  1, D + 1, ...  |  ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.cache import Cache, axes, check_held, shardings
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.layer.regions import Regions
from kvq_jax.placement.placement import Placement
from kvq_jax.placement.processes import fetched
from kvq_jax.types.array_types import ArraySpec

Reorder = Callable[[Any], np.ndarray]  # of one array
ReorderBody = Callable[
    [ArraySpec, Regions, np.ndarray], np.ndarray
]  # by the description of a block


def move(cache: Cache, placement: Placement | None) -> Cache:
    """Return the same cache where `placement` says, or on one device for None, bit for bit. The
    host holds one array at a time.

    Raises ValueError, in one line, where the method cannot have the placement.
    """
    check_held(cache)
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
    tokens. Every process gets all of it."""
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
    where = jax.tree.leaves(shardings(described, described.placement))
    return [
        lambda host, where=where: jax.make_array_from_callback(
            host.shape, where, lambda index: host[index]
        )
        for where in where
    ]


def _for_bodies(cache: Cache, placement: Placement | None, reorder: ReorderBody) -> list[Reorder]:
    """Return a function for each array: the identity but for body arrays that a placement deals
    out."""
    described = axes(cache.spec, cache.dims, cache.batch, cache.capacity, cache.dtype, placement)

    def of_layer(plan: LayerPlan, layer: Any) -> Any:
        def of(block: ArraySpec) -> Reorder:
            return lambda array: reorder(block, plan.regions, array)

        whole = jax.tree.map(lambda _: np.asarray, layer)
        if plan.regions.shards == 1:
            return jax.tree.leaves(whole)
        blocks = tuple(codec.body(1, 1, plan.regions.block) for codec in plan.codecs)
        parts = {
            "sink": whole.sink,
            "ring": whole.ring,
            "body": jax.tree.map(of, blocks),
            "stats": whole.stats,
        }
        return [
            leaf
            for name in ("sink", "ring", "body", "stats")
            for leaf in jax.tree.leaves(parts[name])
        ]

    layers = [
        found
        for plan, layer in zip(described.plans, described.layers, strict=True)
        for found in of_layer(plan, layer)
    ]
    return [*layers, np.asarray]


def _ordered(block: ArraySpec, regions: Regions, array: np.ndarray) -> np.ndarray:
    """Return a body array in the order of tokens, from one that is dealt out. `block` describes
    that of one block."""
    axis, entries = block.axis("tokens"), block["tokens"].size
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    dealt = array.reshape(*before, regions.shards, -1, entries, *after)
    ordered = np.swapaxes(dealt, axis, axis + 1).reshape(array.shape)
    return np.ascontiguousarray(
        ordered[(slice(None),) * axis + (slice(regions.body_capacity // regions.block * entries),)]
    )


def _dealt(block: ArraySpec, regions: Regions, array: np.ndarray) -> np.ndarray:
    """Return a body array dealt out to shards, from one in the order of tokens: the inverse of
    `_ordered`, with zeros where no block is."""
    axis, entries = block.axis("tokens"), block["tokens"].size
    missing = regions.held_capacity * regions.shards // regions.block * entries - array.shape[axis]
    whole = np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    before, after = whole.shape[:axis], whole.shape[axis + 1 :]
    ordered = whole.reshape(*before, -1, regions.shards, entries, *after)
    return np.ascontiguousarray(np.swapaxes(ordered, axis, axis + 1).reshape(whole.shape))
