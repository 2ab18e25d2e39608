"""Count the memory of a cache: its own arrays, and the arrays that a model and a step need beside
them."""

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
    """The bytes that a cache of B sequences with a capacity of S tokens takes.

    Attributes:
        cache: bytes of its arrays: codes, scales, windows and statistics.
        parameters: bytes that the method adds to the model, whatever the batch: calibrated arrays
            and factors of weights, but not weights that are used unchanged.
        working: bytes of a step's working memory: the accumulator [B, S, D] of cross-layer methods.
        elements: 2 * L * B * K * S * H, the number of keys' and values' entries that the cache
            stands for, with the window in place of S in layers that have a shorter one.
    """

    cache: int
    parameters: int
    working: int
    elements: int

    @property
    def resident(self) -> int:
        """Return the bytes that the cache adds to the model."""
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
    """Return the memory that a cache takes. Exact, counted from shapes. Allocates nothing.

        size("xquant:bits=4", config, batch=1, capacity=32768).resident_bits   # Llama-3.1-8B: 4.81

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.
        batch: number of sequences.
        capacity: tokens of each sequence.
        dtype: the dtype of full-precision rows and of arrays made from the model's weights. It is
            bfloat16 unless you pass another, whatever the config's dtype is, so that specs compare
            alike. Pass that of `init_cache` to count its bytes.

    Raises:
        ValueError: as `init_cache`.
    """
    return size_of(layout(spec, config, batch, capacity, dtype))


def size_of(cache: Cache) -> Size:
    """Return the memory that a cache, or its layout, takes on one device."""
    return Size(
        cache=nbytes(cache),
        parameters=sum(parameter_bytes(cache)),
        working=max((nbytes(spec) for spec in accumulators(cache)), default=0),
        elements=dense_nbytes(cache.dims, cache.batch, cache.capacity, "uint8"),
    )


def parameter_bytes(cache: Cache) -> list[int]:
    """Return the bytes that the parameters of each layer add to a model of the cache's dtype.

    On a mesh, these are the bytes on each device. Parameters are whole on all of them, so weights
    that are used unchanged count there if the model's own weights are split.
    """
    mesh = cache.placement
    split = mesh is not None and mesh.size("heads") * mesh.size("tokens") > 1
    plans = cache.plans
    counted = {
        plan: _parameter_bytes(plan, cache.dims, cache.dtype, shared=not split)
        for plan in dict.fromkeys(plans)
    }
    return [counted[plan] for plan in plans]


def _parameter_bytes(plan: LayerPlan, dims: CacheDims, dtype: str, *, shared: bool) -> int:
    """Return the bytes of a layer's parameters, without the model's own weights if these are
    `shared`."""
    total = 0
    for codec in plan.codecs:
        weights, derived = next(described_from_weights(codec, plan, dims.hidden_size, dtype))
        unchanged = {id(leaf) for leaf in jax.tree.leaves(weights)} if shared else set()
        total += nbytes([leaf for leaf in jax.tree.leaves(derived) if id(leaf) not in unchanged])
        total += nbytes([codec.learning.carried(plan.heads), codec.learning.derived(plan.heads)])
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
