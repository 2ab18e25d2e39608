"""Find damage in the memory of a live cache: sums of whatever does not change any more.

A block of the body never changes once it is quantized, a row of a window not until a newer token
takes its slot, the number of intact codes not until a trim, and prompt statistics not after the
first prompt, or once a block is quantized if they widen until then. `seal` sums these parts of
every sequence, and `verify` compares the sums with those of the cache as it is later.

    sum(part) = sum_i word_i * (2654435761 * i | 1)    mod 2^32

The factors are odd, so a flipped bit always changes its sum. Sums of a body go no further than its
tokens: beyond them it may hold anything. Arrays of a body that have no tokens, such as counters of
dropped outliers, may change at any time and are not covered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

from kvq_jax.cache.cache import Cache, axes, check_cache
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import ArraySpec
from kvq_jax.types.integers import check_at_most

WITHOUT_TOKENS = ("stats", "intact", "floor")  # fields of LayerState
FACTOR = 2654435761  # Knuth's, so that neighbouring words have unlike factors
PIECE = 2048  # tokens of a body that are summed at a time

Seals: TypeAlias = "dict[int, Seal]"  # by layer
Place: TypeAlias = tuple[int, int | None, int | None]  # axes of sequences and tokens, a piece


@dataclasses.dataclass(frozen=True)
class Seal:
    """The sums of one layer, on the host. lengths [B]: tokens of each sequence. sums: [B, parts] of
    each array."""

    lengths: np.ndarray
    sums: tuple[np.ndarray, ...]

    def of(self, row: int) -> Seal:
        """Return the seal of one sequence."""
        return Seal(self.lengths[row, None], tuple(sums[row, None] for sums in self.sums))


@dataclasses.dataclass(frozen=True)
class Damage:
    """Parts of a cache that are not what they were.

    Attributes:
        layer: its index.
        row: the sequence of the batch.
        array: the place in the layer's state, such as ".ring[0]"; "lengths" for a length.
        parts: entries along the array's tokens; (0,) for statistics and lengths.
    """

    layer: int
    row: int
    array: str
    parts: tuple[int, ...]


def seal(cache: Cache, layers: Sequence[int] | None = None, row: int | None = None) -> Seals:
    """Return the sums of these layers of a cache on one device, by default of all, or those of one
    sequence alone. They take time for the tokens that there are, and not for the capacity.

    Raises NotImplementedError for a cache on a mesh, ValueError if the cache was consumed or has no
    such layer or row.
    """
    check_cache(cache)
    if cache.placement is not None:
        raise NotImplementedError("caches on a mesh cannot be verified; leave out placement")
    lengths = np.array(cache.lengths)
    chosen = range(len(cache.layers)) if layers is None else layers
    if np.ndim(chosen) != 1:
        raise ValueError(f"{layers=} must be a sequence of layers, such as [0, 1]")
    check_at_most("layers", chosen, len(cache.layers) - 1)
    if row is not None and np.ndim(row):
        raise ValueError(f"row must be the number of one row, got an array {list(np.shape(row))}")
    check_at_most("row", 0 if row is None else row, cache.batch - 1)
    of_rows = lengths if row is None else lengths[row, None]
    # all layers are dispatched before the first is waited for
    sums = {layer: _sums_of_layer(cache, layer, int(of_rows.max()), row) for layer in chosen}
    return {layer: Seal(of_rows, tuple(map(np.asarray, arrays))) for layer, arrays in sums.items()}


def verify(cache: Cache, seals: Seals) -> tuple[Damage, ...]:
    """Return what has changed since `seal` and should not have. Exact for single bits.

    Args:
        cache: the same sequences, with as many tokens as then, or more.
        seals: what `seal` returned.

    Raises as `seal`, and ValueError for seals of another cache or of one of its rows.
    """
    if not isinstance(seals, Mapping) or not all(isinstance(s, Seal) for s in seals.values()):
        raise ValueError(f"seals must be what kvq.files.seal returns, got {type(seals).__name__}")
    now = seal(cache, tuple(seals))
    if any(_shapes(before) != _shapes(now[layer]) for layer, before in seals.items()):
        raise ValueError("these seals are of another cache, or of one of its rows: seal it again")
    return tuple(
        damage
        for layer, before in seals.items()
        for damage in changes(cache, layer, before, now[layer])
    )


def _shapes(one: Seal) -> list[tuple[int, ...]]:
    return [array.shape for array in (one.lengths, *one.sums)]


def changes(cache: Cache, layer: int, before: Seal, now: Seal) -> list[Damage]:
    """Return the damage of one layer between two seals."""
    shorter = np.flatnonzero(now.lengths < before.lengths)
    damages = [Damage(layer, int(row), "lengths", (0,)) for row in shorter]
    regions = cache.plans[layer].regions
    for array, old, new in zip(_arrays(cache, layer), before.sums, now.sums, strict=True):
        differ = old != new
        for row in np.flatnonzero(differ.any(axis=1)):
            if row not in shorter:
                lengths = int(before.lengths[row]), int(now.lengths[row])
                parts = np.flatnonzero(differ[row] & array.stays(regions, *lengths))
                if parts.size:
                    damages.append(Damage(layer, int(row), array.path, tuple(parts.tolist())))
    return damages


@dataclasses.dataclass(frozen=True)
class _Covered:
    """One array of a layer: its path, its field of LayerState, its description. widens: it grows
    until a block is quantized."""

    path: str
    field: str
    spec: ArraySpec
    widens: bool

    @property
    def axes(self) -> tuple[int, int | None]:
        """Return the axes of sequences and of tokens, None if there are no tokens."""
        tokens = None if self.field in WITHOUT_TOKENS else self.spec.axis("tokens")
        return self.spec.axis("batch"), tokens

    def piece(self, regions: Regions) -> int | None:
        """Return how many parts are summed at a time, up to the last one with tokens, or None if
        all are summed at once."""
        if self.field != "body" or regions.wraps:
            return None
        axis = self.spec["tokens"]
        parts = -(-axis.size * PIECE // axis.count)
        return parts if parts < axis.size else None

    def pieces(self, regions: Regions, length: int) -> int:
        """Return the number of pieces that hold tokens of sequences of this length."""
        if (piece := self.piece(regions)) is None:
            return 0
        axis = self.spec["tokens"]
        return -(-regions.aged_tokens(length) * axis.size // (axis.count * piece))

    def stays(self, regions: Regions, before: int, now: int) -> np.ndarray:
        """Return a mask of the parts that a sequence had at the length `before` and has at
        `now`."""
        if self.field in WITHOUT_TOKENS:
            return np.array([(regions.aged_tokens(before) if self.widens else before) > 0])
        axis = self.spec["tokens"]
        index = np.arange(axis.size)
        if self.field == "body":
            slots = index * axis.count // (axis.size * regions.block)
            then, later = (_blocks(regions, slots, length) for length in (before, now))
            return (then == later) & (then >= 0)
        if self.field == "sink":
            return index < before
        then, later = (_ring(regions, length) for length in (before, now))
        return (then == later) & (then >= regions.sink)


def _blocks(regions: Regions, slots: np.ndarray, length: int) -> np.ndarray:
    """Return the block of the body that each of its slots holds, negative if there is none."""
    newest = regions.aged_tokens(length) // regions.block - 1
    if not regions.wraps:
        return np.where(slots <= newest, slots, -1)
    blocks = newest - (newest - slots) % regions.block_slots
    return np.where(slots < regions.block_slots, blocks, -1)  # the last one is for spare codes


def _ring(regions: Regions, length: int) -> np.ndarray:
    """Return the position that each ring slot holds, as `Regions.ring_positions`."""
    newest, slots = length - 1, regions.ring_slots
    return newest - (newest - regions.sink - np.arange(slots)) % slots


def _arrays(cache: Cache, layer: int) -> tuple[_Covered, ...]:
    return _covered(
        cache.spec, cache.dims, cache.batch, cache.capacity, cache.dtype, cache.placement, layer
    )


@functools.lru_cache(maxsize=4096)
def _covered(*described: Any) -> tuple[_Covered, ...]:
    *facts, layer = described
    layout = axes(*facts)
    codecs = layout.plans[layer].codecs

    def covered(path: Any, spec: ArraySpec) -> _Covered:
        field = path[0].name
        widens = field == "stats" and codecs[path[1].idx].statistics.widens
        return _Covered(jax.tree_util.keystr(path), field, spec, widens)

    leaves = jax.tree_util.tree_leaves_with_path(layout.layers[layer])
    arrays = (covered(path, spec) for path, spec in leaves if math.prod(spec.shape))
    return tuple(one for one in arrays if one.field != "body" or "tokens" in one.spec.names)


def _sums_of_layer(
    cache: Cache, layer: int, length: int, row: int | None
) -> tuple[UInt32[Array, "B parts"], ...]:
    arrays = _arrays(cache, layer)
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache.layers[layer])
    }
    chosen = tuple(leaves[one.path] for one in arrays)
    regions = cache.plans[layer].regions
    places = tuple((*one.axes, one.piece(regions)) for one in arrays)
    counts = np.array([one.pieces(regions, length) for one in arrays], np.int32)
    return _sums(chosen, places, counts, None if row is None else np.int32(row))


@functools.partial(jax.jit, static_argnames="places")
def _sums(
    arrays: tuple[Array, ...],
    places: tuple[Place, ...],
    counts: Int[Array, "arrays"],
    row: Int[Array, ""] | None = None,
) -> tuple[UInt32[Array, "B parts"], ...]:
    """Return the sums of each array's first pieces, or those of one sequence. Zeros lie behind
    them."""
    return tuple(
        _sum_of_pieces(array, *place, counts[i], row)
        for i, (array, place) in enumerate(zip(arrays, places, strict=True))
    )


def _sum_of_pieces(
    array: Array,
    batch: int,
    tokens: int | None,
    piece: int | None,
    count: Int[Array, ""],
    row: Int[Array, ""] | None,
) -> UInt32[Array, "B parts"]:
    # one slice of both axes: a row that is cut before the loop is a copy of it
    starts: list[int | Array] = [0] * array.ndim
    sizes = list(array.shape)
    if row is not None:
        starts[batch], sizes[batch] = row, 1
    if tokens is None or piece is None:
        return _sum(lax.dynamic_slice(array, starts, sizes), batch, tokens)
    parts, sizes[tokens] = array.shape[tokens], piece

    def add(i: Array, sums: Array) -> Array:
        first = jnp.minimum(i * piece, parts - piece)
        part = lax.dynamic_slice(array, [*starts[:tokens], first, *starts[tokens + 1 :]], sizes)
        return lax.dynamic_update_slice_in_dim(sums, _sum(part, batch, tokens), first, 1)

    return lax.fori_loop(0, count, add, jnp.zeros((sizes[batch], parts), jnp.uint32))


def _sum(array: Array, batch: int, tokens: int | None) -> UInt32[Array, "B parts"]:
    if array.dtype == jnp.bool_:
        words = array.astype(jnp.uint32)
    else:
        unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        words = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    kept = (batch,) if tokens is None else (batch, tokens)
    others = [axis for axis in range(array.ndim) if axis not in kept]
    index, stride = jnp.zeros([1] * array.ndim, jnp.uint32), 1
    for axis in reversed(others):
        index = index + lax.broadcasted_iota(
            jnp.uint32, [n if i == axis else 1 for i, n in enumerate(array.shape)], axis
        ) * jnp.uint32(stride)
        stride *= array.shape[axis]
    factors = index * jnp.uint32(FACTOR) | jnp.uint32(1)
    sums = jnp.sum(words * factors, axis=others, dtype=jnp.uint32)
    if tokens is None:
        return sums[:, None]
    return sums if batch < tokens else sums.T
