"""Read and write the body of a layer, which wraps around if the layer has a sliding window shorter
than the capacity (layer/regions.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvq_jax.arrays.stored import BodySpec, load_row_blocks
from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import Route
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.kept_codes import unwritten
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import LengthsB, Tree


def held_from(plan: LayerPlan, state: LayerState, lengths: LengthsB) -> LengthsB:
    """Return the first body token that a layer whose body wraps around still holds, with rows of
    these lengths."""
    regions = plan.regions
    assert state.floor is not None, "the body wraps around"
    written = unwritten(regions, state.intact, lengths)
    return jnp.maximum(state.floor, regions.oldest(written))


def blocks_from(regions: Regions, block: Tree, stored: Tree, first: LengthsB, count: int) -> Tree:
    """Return the values of `count` blocks of each row b, from the held body token first[b] on."""
    if not regions.wraps:
        return load_row_blocks(block, stored, first // regions.block, count)
    places = (regions.place(first // regions.block + i) for i in range(count))
    values = [load_row_blocks(block, stored, place, 1) for place in places]
    return jax.tree.map(
        lambda spec, *parts: jnp.concatenate(parts, axis=spec.axis("tokens")), block, *values
    )


def with_blocks(
    plan: LayerPlan,
    codec: Codec,
    stored: Tree,
    coded: Tree,
    first: LengthsB,
    count: LengthsB,
    route: Route,
) -> Tree:
    """Return the body with the leading count[b] blocks of `coded` from block first[b] on. Raise
    ValueError, in one line, if they are not the arrays that the codec describes."""
    _check_coded(plan, codec, coded, len(first))
    regions, spec = plan.regions, codec.body(1, 1, plan.regions.block)
    if not regions.wraps:
        return dispatch.store_blocks(spec, stored, coded, first, count, route)
    at = regions.place(first)
    before_end = jnp.minimum(count, regions.block_slots - at)
    stored = dispatch.store_blocks(spec, stored, coded, at, before_end, route)
    arrays = zip(jax.tree.leaves(spec), jax.tree.leaves(coded), strict=True)
    if all(array.shape[of.axis("tokens")] == of["tokens"].size for of, array in arrays):
        return stored  # a single block
    # the others go to the first slots
    coded = jax.tree.map(lambda spec, array: _rolled(spec, array, before_end), spec, coded)
    return dispatch.store_blocks(spec, stored, coded, 0 * at, count - before_end, route)


def _check_coded(plan: LayerPlan, codec: Codec, coded: Tree, batch: int) -> None:
    described = codec.body(batch, plan.heads, plan.regions.block)
    codecs = zip(plan.names, plan.codecs, strict=True)
    side = next(name for name, planned in codecs if planned is codec)
    made = f"{type(codec).__name__}.quantize of {side}"
    wanted, given = jax.tree.structure(described), jax.tree.structure(coded)
    if given != wanted:
        raise ValueError(f"{made} returned {given}, and its body describes {wanted}")
    arrays = zip(
        jax.tree_util.tree_leaves_with_path(described), jax.tree.leaves(coded), strict=True
    )
    for (path, spec), array in arrays:
        expected, shape, tokens = list(spec.shape), list(array.shape), spec.axis("tokens")
        if len(shape) == len(expected) and shape[tokens] % spec["tokens"].size == 0:
            expected[tokens] = shape[tokens]  # of as many blocks as are coded
        if shape != expected or array.dtype != spec.dtype:
            name = jax.tree_util.keystr(path) or "its array"
            raise ValueError(
                f"{made} returned {array.dtype.name} {shape} for {name}, and its body describes"
                f" {spec.dtype} {expected}"
            )


def _rolled(spec: BodySpec, array: Array, blocks: Int[Array, "B"]) -> Array:
    """Return the array of some blocks with blocks[b] of them moved from the start of row b to its
    end."""
    axis = spec.axis("tokens")
    shift = jax.vmap(lambda row, by: jnp.roll(row, -by * spec["tokens"].size, axis - 1))
    return shift(array, blocks)
