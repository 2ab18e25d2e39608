"""Shorten, select, repeat and join the batch rows of caches. The functions are pure and jittable.
All regions of a row move together.

    trim         speculative decoding takes back rejected tokens, a chat goes back a turn
    select_rows  beam search reorders its beams, a server drops finished sequences
    repeat_rows  one prompt gets several continuations
    merge_rows   two batches become one
    replace_row  a server puts a new sequence into a vacant row of a running batch
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int

from kvq_jax.cache import layer_step
from kvq_jax.cache.cache import Cache, check_cache, shardings
from kvq_jax.cache.dims import CacheDims
from kvq_jax.cache.layer_cache import LayerCache
from kvq_jax.cache.parameters import parameter_axes, parameters_by_layer
from kvq_jax.cache.update import take_tokens
from kvq_jax.cache.wrapped_body import blocks_from, held_from
from kvq_jax.layer import cross_layer
from kvq_jax.layer.kept_codes import after_trim, copied_codes
from kvq_jax.layer.plan import LayerPlan, LayerState, by_side
from kvq_jax.placement.allowed import check_rows
from kvq_jax.placement.crossing import crossing
from kvq_jax.placement.placement import Placement
from kvq_jax.placement.processes import fetched
from kvq_jax.placement.shards import of_holder, on_shards, parameter_partition, state_partition
from kvq_jax.types.array_types import ArraySpec, Integers, LengthsB, Tree
from kvq_jax.types.integers import int32, positive
from kvq_jax.types.pytree import describe


def trim(cache: Cache, lengths: Integers, parameters: tuple[Tree, ...] = ()) -> Cache:
    """Return the cache with every row shortened to at most lengths[b] tokens. The newest tokens are
    dropped, and shorter rows do not change.

    The ageing rule body(n) holds afterwards: body tokens that now belong to the recent window are
    dequantized into it, so they keep the value that attention saw. If they age again with the same
    neighbours, they keep their codes. The block that is cut is quantized again once new tokens fill
    it, but the next trim to that place brings back the first codes (kept_codes.py). So the error
    does not grow with the answers that are generated again. Only blocks that can come back are
    dequantized. A row that is trimmed to 0 tokens is like a new one.

    A layer with a sliding window holds the tokens of the window and a few before it, so a row can
    be trimmed by as many tokens, at least 64, or to 0. Attention after a traced trim that goes
    further is NaN until the window has no token from before it.

    Args:
        cache: the cache.
        lengths: [B] integers of at least 0, the most tokens that each row keeps. Traced lengths
            cannot be checked and are clamped.
        parameters: the method's parameters for each layer, `()` for methods without any.

    Raises:
        ValueError: if `lengths` is not [B] or holds other values, parameters are those of another
            number of layers, a window has left the tokens that a row would go back to, or the cache
            was consumed.
    """
    _check(cache)
    limits = _limits(cache.batch, lengths)
    check_windows(cache, limits)
    by_layer = parameters_by_layer(cache, parameters)
    for layer, (plan, params) in enumerate(zip(cache.plans, by_layer, strict=True)):
        layer_step.check_parameters(str(cache.spec), layer, plan, params, "trim(..., parameters)")
    return _apply(_trimmed, cache.placement, cache, limits, by_layer)


def trim_layer(
    plan: LayerPlan,
    dims: CacheDims,
    dtype: str,
    placement: Placement | None,
    params: Tree,
    cache: LayerCache,
    lengths: Integers,
) -> LayerCache:
    """Shorten the rows of one layer's cache, as `trim` does those of all layers."""
    limits = _limits(len(cache.lengths), lengths)
    _check_windows(((plan, cache.state),), cache.lengths, limits)
    if placement is None:
        return _trimmed_layer(plan, dims, dtype, None, params, cache, limits)
    with crossing(placement) as mesh:
        arrays = mesh.taken((params, cache, limits))
        return _compiled_layer(plan, dims, dtype, placement, *arrays)


def _trimmed_layer(
    plan: LayerPlan,
    dims: CacheDims,
    dtype: str,
    placement: Placement | None,
    params: Tree,
    cache: LayerCache,
    limits: LengthsB,
) -> LayerCache:
    lengths = jnp.clip(limits, 0, cache.lengths)
    through = _trim_layer if placement is None else _trim_layer_on_shards(dims, placement)
    state, _ = through(plan, params, cache.state, cache.lengths, lengths, None)
    after = LayerCache(state, lengths)
    if placement is None:
        return after
    states = placement.shardings(plan.axes(len(lengths), dtype))
    split = describe(LayerCache, state=states, lengths=placement.everywhere)
    return jax.tree.map(lax.with_sharding_constraint, after, split)


_compiled_layer = jax.jit(_trimmed_layer, static_argnums=(0, 1, 2, 3))


def _check(cache: Cache) -> None:
    """Raise ValueError if this is not a cache, it was consumed, or Explicit axes split it."""
    check_cache(cache)
    layer_step.check_cache_split(cache.placement, cache.lengths, cache.layers)


def _limits(batch: int, lengths: Integers) -> LengthsB:
    """Return the lengths to which rows are trimmed. Raise ValueError if they are none."""
    limits = jnp.asarray(int32("lengths", lengths))
    if limits.shape != (batch,):
        raise ValueError(f"lengths must be [{batch}], got shape {limits.shape}")
    if not isinstance(limits, Tracer) and np.asarray(limits).min() < 0:
        raise ValueError(f"lengths must be at least 0, got {np.asarray(limits).tolist()}")
    return limits


def check_windows(cache: Cache, limits: Array) -> None:
    """Raise ValueError if a layer no longer holds the tokens that a trimmed row's next token
    sees."""
    _check_windows(zip(cache.plans, cache.layers, strict=True), cache.lengths, limits)


def _check_windows(
    layers: Iterable[tuple[LayerPlan, LayerState]], before: LengthsB, limits: Array
) -> None:
    wrapped = [(plan, state) for plan, state in layers if plan.regions.wraps]
    arrays = limits, before, *jax.tree.leaves([state for _, state in wrapped])
    if not wrapped or any(isinstance(array, Tracer) for array in arrays):
        return
    lengths, kept = fetched(before), np.asarray(limits)
    for plan, state in wrapped:
        window = plan.regions.window
        oldest = fetched(held_from(plan, state, before))
        lost = (kept > 0) & (kept < lengths) & (np.maximum(kept - window + 1, 0) < oldest)
        for row in np.flatnonzero(lost):
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, and a layer with a window of {window} tokens"
                f" can go back to {oldest[row] + window - 1}, not to {kept[row]}: trim the row to"
                " that length or to 0"
            )


def _trimmed(cache: Cache, limits: LengthsB, parameters: tuple[Tree, ...]) -> Cache:
    lengths = jnp.clip(limits, 0, cache.lengths)
    trim_layer = _trim_layer
    if cache.placement is not None:
        trim_layer = _trim_layer_on_shards(cache.dims, cache.placement)
    layers, below = [], None
    for plan, params, state in zip(cache.plans, parameters, cache.layers, strict=True):
        state, below = trim_layer(plan, params, state, cache.lengths, lengths, below)
        layers.append(state)
    return dataclasses.replace(cache, layers=tuple(layers), lengths=lengths)


def select_rows(cache: Cache, index: Integers) -> Cache:
    """Return a cache of the rows index[0], index[1], ...: a selection, a new order, or copies.
    Exact.

    Args:
        cache: the cache.
        index: a vector of row numbers 0 .. B-1. Traced numbers cannot be checked and are clamped.

    Raises:
        ValueError: if `index` is not such a vector, the placement cannot split that many rows, or
            the cache was consumed.
    """
    _check(cache)
    index = jnp.asarray(int32("index", index))
    if index.ndim != 1 or not index.size:
        raise ValueError(f"index must be a vector of row numbers, got shape {index.shape}")
    if not isinstance(index, Tracer):
        outside = [i for i in np.asarray(index).tolist() if not 0 <= i < cache.batch]
        if outside:
            raise ValueError(
                f"index names row {outside[0]}, but the cache has rows 0 to {cache.batch - 1}"
            )
    check_rows(cache.placement, len(index))
    return _apply(_selected, cache.placement, cache, index)


def _selected(cache: Cache, index: Array) -> Cache:
    return jax.tree.map(
        lambda spec, array: jnp.take(array, index, axis=spec.axis("batch"), mode="clip"),
        cache.axes,
        cache,
    )


def repeat_rows(cache: Cache, repeats: int) -> Cache:
    """Return a cache with every row repeated, copies side by side: row b becomes rows b * repeats
    .. (b + 1) * repeats - 1. Exact.

    Args:
        cache: the cache.
        repeats: the number of copies of each row, at least 1.

    Raises:
        ValueError: if `repeats` is not an integer of at least 1, or as `select_rows`.
    """
    check_cache(cache)
    return select_rows(cache, np.repeat(np.arange(cache.batch), positive("repeats", repeats)))


def merge_rows(first: Cache, second: Cache) -> Cache:
    """Return a cache with the rows of `first`, then the rows of `second`. Exact.

    Args:
        first: a cache.
        second: a cache of the same spec, dims, capacity, dtype and placement.

    Raises:
        ValueError: if the caches differ in one of these fields (the message names it), or one was
            consumed.
    """
    _check_alike(first, second, "cannot be merged")
    return _apply(_merged, first.placement, first, second)


def _merged(first: Cache, second: Cache) -> Cache:
    return jax.tree.map(
        lambda spec, *rows: jnp.concatenate(rows, axis=spec.axis("batch")),
        first.axes,
        first,
        second,
    )


def replace_row(cache: Cache, index: Integers, row: Cache) -> Cache:
    """Return the cache with `row`, a cache of one row, in place of its row `index`. Nothing of the
    old row remains. Exact.

    Shapes do not change, and the index may be traced, so one program serves every row. If it
    donates the cache, only the bytes of one row are written.

    Args:
        cache: the cache.
        index: the row number, 0 .. B-1. A traced number cannot be checked and is clamped.
        row: a cache of one row with the same spec, dims, capacity, dtype and placement.

    Raises:
        ValueError: if the caches differ in one of these fields (the message names it), `row` does
            not have exactly one row, `index` is not a row number, or a cache was consumed.
    """
    _check_alike(cache, row, "share no rows")
    index = jnp.asarray(int32("index", index))
    if row.batch != 1 or index.ndim:
        raise ValueError(
            f"one row replaces one: got a cache of {row.batch} rows and an index of shape"
            f" {index.shape}"
        )
    if not isinstance(index, Tracer) and not 0 <= int(index) < cache.batch:
        raise ValueError(f"index={int(index)}, but the cache has rows 0 to {cache.batch - 1}")
    return _apply(_replaced, cache.placement, cache, index, row)


def _replaced(cache: Cache, index: Int[Array, ""], row: Cache) -> Cache:
    def put(spec: ArraySpec, array: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(array, new, index, axis=spec.axis("batch"))

    return jax.tree.map(put, cache.axes, cache, row)


def _check_alike(first: Cache, second: Cache, failure: str) -> None:
    _check(first)
    _check(second)
    for field in ("spec", "dims", "capacity", "dtype", "placement"):
        one, other = getattr(first, field), getattr(second, field)
        if one != other:
            raise ValueError(f"caches with different {field} {failure}: {one} and {other}")


def _apply(operation: Callable[..., Cache], placement: Placement | None, *arguments: Any) -> Cache:
    """Return operation(*arguments). On a mesh it is one program, whose result has the same
    placement."""
    if placement is None:
        return operation(*arguments)
    with crossing(placement) as mesh:
        return _compiled(operation, *mesh.taken(arguments))


@functools.partial(jax.jit, static_argnums=0)
def _compiled(operation: Callable[..., Cache], *arguments: Any) -> Cache:
    cache = operation(*arguments)
    assert cache.placement is not None
    return jax.tree.map(lax.with_sharding_constraint, cache, shardings(cache.axes, cache.placement))


def _trim_layer_on_shards(
    dims: CacheDims, placement: Placement
) -> Callable[..., tuple[LayerState, Array | None]]:
    """Return `_trim_layer`, run on every shard."""

    def run(
        plan: LayerPlan,
        params: Tree,
        state: LayerState,
        old: LengthsB,
        new: LengthsB,
        below: Array | None,
    ) -> tuple[LayerState, Array | None]:
        states, rows = state_partition(plan, placement), placement.along("batch")
        described = functools.partial(parameter_axes, plan, dims, params)
        parameters = parameter_partition(placement, described, params)
        carried = placement.along("batch", "none", "tokens", "model", body=True)
        local = functools.partial(_trim_layer, plan.share(placement.size("heads")))
        arguments = (parameters, states, rows, rows, carried)
        on_all = on_shards(local, placement, arguments, (states, carried))
        return on_all(params, state, old, new, below)

    return run


@functools.partial(jax.jit, static_argnums=0)  # equal layers are traced and lowered once
def _trim_layer(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    old: LengthsB,
    new: LengthsB,
    below: Array | None,
) -> tuple[LayerState, Array | None]:
    """Return the shortened state and, for cross-layer methods, the accumulator [B, 1, T, D] of the
    blocks that can come back."""
    regions = plan.regions
    emptied = (new == 0) & (old > 0)

    def reset(spec: ArraySpec, stat: Array, initial: Array) -> Array:
        return jnp.where(spec.along("batch", emptied), initial, stat)

    specs = tuple(codec.statistics.spec(old.shape[0], plan.heads) for codec in plan.codecs)
    initial = tuple(codec.statistics.initial(old.shape[0], plan.heads) for codec in plan.codecs)
    stats = jax.tree.map(reset, specs, state.stats, initial)
    state = dataclasses.replace(state, stats=stats)
    if state.floor is not None:
        floor = jnp.where(new < old, held_from(plan, state, old), state.floor)
        state = dataclasses.replace(state, floor=jnp.where(emptied, 0, floor))
    # The window of recent .. recent + block - 1 tokens touches the blocks that can come back.
    touched = -(-(regions.recent + regions.block - 1) // regions.block)
    blocks = regions.max_held(min(touched, regions.block_slots))
    if not blocks:
        return state, None
    kept = after_trim(regions, state.intact, old, new)
    body = tuple(
        copied_codes(regions, codec.body(1, 1, regions.block), stored, kept)
        for codec, stored in zip(plan.codecs, state.body, strict=True)
    )
    state = dataclasses.replace(state, body=body, intact=kept.intact)
    # [B], the first body token of this shard to dequantize
    first = regions.held(regions.aged_tokens(new))
    if not regions.wraps:
        first = jnp.minimum(first, regions.held_capacity - blocks * regions.block)
    # the token that each ring slot holds now, counted from the start of the body
    index = regions.ring_positions(new) - regions.sink
    returns = (index >= regions.aged_tokens(new)[:, None]) & (
        index < regions.aged_tokens(old)[:, None]
    )
    ring, carried = [], below
    for side, codec in enumerate(plan.codecs):
        coded = blocks_from(
            regions, codec.body(1, 1, regions.block), state.body[side], first, blocks
        )
        side_params = by_side(params)[side]
        rows = codec.dequantize(side_params, state.stats[side], coded)
        if plan.cross_layer:
            carried = cross_layer.after(plan.cross_layer, side_params, rows, below)
        rows = cross_layer.decoded(codec, side_params, rows, below)
        back = take_tokens(rows, regions.held_index(index) - first[:, None])
        back = back.astype(state.ring[side].dtype)
        if regions.axis is not None:
            back = of_holder(back, regions.holds(index)[:, None, :, None], regions.axis)
        ring.append(jnp.where(returns[:, None, :, None], back, state.ring[side]))
    return dataclasses.replace(state, ring=tuple(ring)), carried
