"""What a cache costs in memory: its own arrays, and what a model and a step need beside them."""

from __future__ import annotations

import dataclasses

import jax
from jax.typing import DTypeLike

from kvq_jax.cache.accounting import dense_nbytes, nbytes
from kvq_jax.cache.cache import Cache, CacheDims, layout
from kvq_jax.cache.parameters import described_from_weights
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.types.array_types import ArraySpec, ModelDims

COMPARED_BATCHES = 1, 16  # for which tables show resident bytes


@dataclasses.dataclass(frozen=True)
class Size:
    """The bytes that a cache takes, of B sequences with a capacity of S tokens.

    cache       its arrays: codes, scales, windows and statistics
    parameters  what the method adds to the model, whatever the batch: calibrated arrays and factors
                of weights, but not weights that are used unchanged
    working     memory of a step: the accumulator [B, S, D] of cross-layer methods
    elements    2 * L * B * K * S * H, the entries of keys and values that the cache stands for
    """

    cache: int
    parameters: int
    working: int
    elements: int

    @property
    def resident(self) -> int:
        """Return the bytes that the cache adds to those of the model."""
        return self.cache + self.parameters + self.working

    @property
    def stored_bits(self) -> float:
        """Return the bits of the cache's arrays for each element."""
        return 8 * self.cache / self.elements

    @property
    def resident_bits(self) -> float:
        """Return the resident bits for each element."""
        return 8 * self.resident / self.elements


def size(
    spec: CacheSpec | str,
    config: ModelDims,
    batch: int,
    capacity: int,
    dtype: DTypeLike = "bfloat16",
) -> Size:
    """Return what a cache costs in memory, counted from shapes: nothing is allocated.

    size("xquant:bits=4", config, batch=1, capacity=32768).resident_bits     # Llama-3.1-8B: 4.81

    Args:
        spec: the cache.
        config: the model's config, or its `CacheDims`.
        batch: sequences.
        capacity: tokens of each sequence.
        dtype: of the model: of the full-precision rows, and of what is made from its weights.

    Raises ValueError as `init_cache` does.
    """
    return size_of(layout(spec, config, batch, capacity, dtype))


def size_of(cache: Cache) -> Size:
    """Return what a cache, or its layout, costs in memory on one device."""
    return Size(
        cache=nbytes(cache),
        parameters=sum(parameter_bytes(cache)),
        working=max((nbytes(spec) for spec in accumulators(cache)), default=0),
        elements=dense_nbytes(cache.dims, cache.batch, cache.capacity, "uint8"),
    )


def parameter_bytes(cache: Cache) -> list[int]:
    """Return the bytes that the parameters of each layer add to a model whose dtype is that of the
    cache.

    On a mesh, to each device: parameters are whole on all of them, so weights that are used
    unchanged count there if the model's own are split.
    """
    where = cache.placement
    split = where is not None and where.size("heads") * where.size("tokens") > 1
    plans = cache.plans
    counted = {
        plan: _parameter_bytes(plan, cache.dims, cache.dtype, shared=not split)
        for plan in dict.fromkeys(plans)
    }
    return [counted[plan] for plan in plans]


def _parameter_bytes(plan: LayerPlan, dims: CacheDims, dtype: str, *, shared: bool) -> int:
    """Return the bytes of a layer's parameters, without those that are the model's own weights if
    these are `shared`."""
    total = 0
    for codec in plan.codecs:
        weights, made = next(described_from_weights(codec, dims, dtype))
        unchanged = {id(leaf) for leaf in jax.tree.leaves(weights)} if shared else set()
        total += nbytes([leaf for leaf in jax.tree.leaves(made) if id(leaf) not in unchanged])
        total += nbytes([codec.learning.parameters(plan.heads), codec.learning.derived(plan.heads)])
    return total


def accumulators(cache: Cache) -> list[ArraySpec]:
    """Describe the accumulator of each layer that has one. A step needs one, whatever the number of
    layers."""
    layers = ((plan.cross_layer, plan.regions) for plan in cache.plans)
    return [
        codec.accumulator(cache.batch, regions.held_capacity * regions.shards)
        for codec, regions in layers
        if codec
    ]
