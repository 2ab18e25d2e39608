"""The arrays of a cache's body: how they are described, stored, read in chunks and written block by block.

A codec describes its body as a tree of `Leaf`; the state holds arrays of the same tree. 16-bit floats are stored as the uint16 that holds
their bits: XLA's CPU backend widens a slice of them by converting the whole array to float32, each step; integers it moves as they are
(docs/decisions.md). Everything here takes and returns values in the leaf's own dtype, but for `stored` trees, which are as the state
holds them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from kvq_jax.array_types import LengthsB, Tree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Shape and dtype of one array of a body, and the axis that grows with tokens."""

    shape: tuple[int, ...]
    dtype: str
    token_axis: int

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """What the state stores."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype("uint16" if self._as_bits else self.dtype))

    @property
    def _as_bits(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    @property
    def entries(self) -> int:
        """Length of the token axis."""
        return self.shape[self.token_axis]

    def load(self, stored: Array) -> Array:
        return lax.bitcast_convert_type(stored, jnp.dtype(self.dtype)) if self._as_bits else stored

    def store(self, values: Array) -> Array:
        return lax.bitcast_convert_type(values, jnp.uint16) if self._as_bits else values


def load_body(block: Tree, stored: Tree) -> Tree:
    """All values of a stored body. `block` is the codec's tree of leaves for one block."""
    return jax.tree.map(lambda leaf, array: leaf.load(array), block, stored)


def load_chunk(block: Tree, stored: Tree, start: Int[Array, ""], blocks: int) -> Tree:
    """Values of `blocks` blocks of every row, from block `start` on."""

    def cut(leaf: Leaf, array: Array) -> Array:
        return leaf.load(lax.dynamic_slice_in_dim(array, start * leaf.entries, blocks * leaf.entries, leaf.token_axis))

    return jax.tree.map(cut, block, stored)


def load_row_blocks(block: Tree, stored: Tree, start: LengthsB, blocks: int) -> Tree:
    """Values of `blocks` blocks of each row b, from block start[b] on."""

    def cut(leaf: Leaf, array: Array) -> Array:
        def one(row: Array, at: Array) -> Array:
            return lax.dynamic_slice_in_dim(row, at * leaf.entries, blocks * leaf.entries, leaf.token_axis - 1)

        return leaf.load(jax.vmap(one)(array, start))

    return jax.tree.map(cut, block, stored)


def store_blocks(block: Tree, stored: Tree, values: Tree, first: LengthsB, count: LengthsB) -> Tree:
    """`stored` with blocks first[b] .. first[b] + count[b] - 1 of each row b replaced by the leading blocks of `values`."""
    return jax.tree.map(lambda leaf, old, new: _store(leaf, old, leaf.store(new), first, count), block, stored, values)


def _store(leaf: Leaf, old: Array, new: Array, first: LengthsB, count: LengthsB) -> Array:
    axis, width = leaf.token_axis, new.shape[leaf.token_axis]
    index = jnp.arange(width).reshape([-1 if i == axis else 1 for i in range(old.ndim)])

    def write(row: Array, whole: Array) -> Array:
        at = jnp.minimum(first[row] * leaf.entries, whole.shape[axis] - width)
        shift = first[row] * leaf.entries - at  # where the window had to start early to stay inside the array
        update = lax.dynamic_slice_in_dim(new, row, 1, axis=0)
        if width > leaf.entries:
            update = jnp.roll(update, shift, axis)
        corner: list[Any] = [0] * old.ndim
        corner[0], corner[axis] = row, at
        kept = lax.dynamic_slice(whole, corner, update.shape)
        merged = jnp.where((index >= shift) & (index < shift + count[row] * leaf.entries), update, kept)
        return lax.dynamic_update_slice(whole, merged, corner)

    # A loop over rows updates in place on every backend; one scatter over rows made XLA's CPU backend copy the array.
    return lax.fori_loop(0, old.shape[0], write, old)
