"""The arrays of a cache's body: describing them, storing them, reading chunks and writing blocks.

A codec describes its body as a tree of `BodySpec`, and the state holds arrays of the same tree.
16-bit floats are stored as the uint16 that holds their bits: XLA's CPU backend widens a slice of
16-bit floats by converting the whole array to float32 in each step, but moves integers as they are
(docs/decisions/packed_layout.md).

Everything here takes and returns values in their own dtype, except `stored` trees, which are as the
state holds them: arrays with sequences first, or a `PagedBody`. `block` is always the codec's tree
of descriptions for one block: the token axes have the entries of one block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.arrays.paged import PagedBody
from kvq_jax.types.array_types import ArraySpec, Axis, LengthsB, Tree


@dataclasses.dataclass(frozen=True)
class BodySpec(ArraySpec):
    """The description of one array that grows with the body's tokens. `dtype` is the dtype of its
    values."""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Return the shape and the dtype of the array that the state stores."""
        return jax.ShapeDtypeStruct(
            self.shape, jnp.dtype("uint16" if self._as_bits else self.dtype)
        )

    @property
    def grows(self) -> bool:
        return True

    @property
    def wrapped(self) -> BodySpec:
        """Return the description of the array in a body that wraps around, and so does not grow."""
        return WrappedSpec(self.axes, self.dtype)

    @property
    def _as_bits(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    def load(self, stored: Array) -> Array:
        return lax.bitcast_convert_type(stored, jnp.dtype(self.dtype)) if self._as_bits else stored

    def store(self, values: Array) -> Array:
        return lax.bitcast_convert_type(values, jnp.uint16) if self._as_bits else values


class WrappedSpec(BodySpec):
    """The description of an array that holds the newest blocks of a body (layer/regions.py)."""

    @property
    def grows(self) -> bool:
        return False


def word_specs(layout: PlaneLayout, batch: int, heads: int, tokens: int) -> tuple[BodySpec, ...]:
    """Describe the packed words of each plane set, [B, K, S/n, w]. n tokens share a row of w
    words."""
    rows = Axis("batch", batch), Axis("kv_heads", heads), Axis("tokens", tokens, per=layout.slots)
    return tuple(
        BodySpec((*rows, Axis("none", layout.words(bits))), "int16") for bits in layout.sets
    )


def load_body(block: Tree, stored: Tree) -> Tree:
    """Return all values of a stored body."""
    if isinstance(stored, PagedBody):
        stored = stored.blocks(block, 0, stored.table.shape[1])
    return jax.tree.map(lambda spec, array: spec.load(array), block, stored)


def load_chunk(block: Tree, stored: Tree, start: Int[Array, ""], blocks: int) -> Tree:
    """Return the values of `blocks` blocks of every row, from block `start` on."""
    if isinstance(stored, PagedBody):
        return load_body(block, stored.blocks(block, start, blocks))

    def cut(spec: BodySpec, array: Array) -> Array:
        entries = spec["tokens"].size
        return spec.load(
            lax.dynamic_slice_in_dim(array, start * entries, blocks * entries, spec.axis("tokens"))
        )

    return jax.tree.map(cut, block, stored)


def load_row_blocks(block: Tree, stored: Tree, start: LengthsB, blocks: int) -> Tree:
    """Return the values of `blocks` blocks of each row b, from block start[b] on."""

    def cut(spec: BodySpec, array: Array) -> Array:
        entries, batch, tokens = spec["tokens"].size, spec.axis("batch"), spec.axis("tokens")

        def cut_row(row: Array, at: Array) -> Array:
            return lax.dynamic_slice_in_dim(
                row, at * entries, blocks * entries, tokens - (tokens > batch)
            )

        return spec.load(jax.vmap(cut_row, (batch, 0), batch)(array, start))

    return jax.tree.map(cut, block, stored)


def store_blocks(block: Tree, stored: Tree, values: Tree, first: LengthsB, count: LengthsB) -> Tree:
    """Return `stored` with blocks first[b] .. first[b] + count[b] - 1 of each row b replaced by the
    leading blocks of `values`."""
    new = jax.tree.map(lambda spec, array: spec.store(array), block, values)
    if isinstance(stored, PagedBody):
        return stored.with_blocks(block, new, first, count)

    def write(rows: Tree, updates: Tree, first: Array, count: Array, *row: Array) -> Tree:
        """Write into one row, or with the index `row` of one into all rows together."""
        return jax.tree.map(
            lambda spec, *arrays: _written(spec, *arrays, first, count, *row), block, rows, updates
        )

    def looped(stored: Tree, new: Tree, first: Array, count: Array) -> Tree:
        def write_row(b: Array, rows: Tree) -> Tree:
            # int64 if jax_enable_x64 is set, and an int of Python under jax.disable_jit
            b = jnp.asarray(b, first.dtype)
            updates = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, b, 1), new)
            return write(rows, updates, first[b], count[b], b)

        return lax.fori_loop(0, len(first), write_row, stored)

    # XLA's CPU backend copies the whole array for a scatter over rows. On a GPU each turn of a loop
    # is two launches for each array (docs/decisions/cpu_steps.md).
    return lax.platform_dependent(
        *(stored, new, first, count),
        cpu=looped,
        default=jax.vmap(write) if len(first) > 1 else looped,
    )


def _written(
    spec: BodySpec, array: Array, update: Array, first: Array, count: Array, *row: Array
) -> Array:
    """Return `array` with the leading `count` blocks of `update` from block `first` on. `array` is
    one row, or all rows together with the index `row` of one."""
    assert spec.axis("batch") == 0, "the batch is the first axis of every stored array"
    tokens, entries = spec.axis("tokens") - 1 + len(row), spec["tokens"].size
    width, size = update.shape[tokens], array.shape[tokens]
    index = spec.along("tokens", jnp.arange(width, dtype=jnp.int32))
    at = jnp.minimum(first * entries, size - width)
    shift = first * entries - at  # > 0 if the window starts early to stay inside the array
    if width > entries:
        update = jnp.roll(update, shift, tokens)
    start = [
        *row,
        *(at if i == tokens else jnp.zeros_like(at) for i in range(len(row), array.ndim)),
    ]
    kept = lax.dynamic_slice(array, start, update.shape)
    inside = (index >= shift) & (index < shift + count * entries)
    return lax.dynamic_update_slice(
        array, jnp.where(inside if row else inside[0], update, kept), start
    )
