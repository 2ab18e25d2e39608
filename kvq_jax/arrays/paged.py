"""Pages: the body of many sequences in one array of blocks, and a table of the blocks that each
sequence has.

    block i of sequence b  =  pages[table[b, i]]

A page holds the codes of one block. Its arrays are the codec's for a body of one block, with pages
in place of sequences. `arrays.stored` reads and writes such a body as it does a dense one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from kvq_jax.types.array_types import LengthsB, Tree
from kvq_jax.types.pytree import pytree

Blocks = Int[Array, "B blocks"]


@pytree
@dataclasses.dataclass(frozen=True)
class PagedBody:
    """A body whose blocks lie in any order.

    pages: the stored arrays, pages first.
    table: the page of each block of each sequence. Blocks past a sequence's length may name any
        page: nobody reads or writes them.
    """

    pages: Tree
    table: Blocks

    def blocks(self, block: Tree, start: int | Int[Array, ""], count: int) -> Tree:
        """Return the stored arrays of `count` blocks of each sequence, from block `start` on: a
        copy. `block` describes one block."""
        pages = lax.dynamic_slice_in_dim(self.table, start, count, axis=1)

        def gather(spec: Any, array: Array) -> Array:
            axis = spec.axis("tokens")
            rows = jnp.moveaxis(jnp.take(array, pages, axis=0, mode="clip"), 1, axis)
            tokens = rows.shape[axis] * rows.shape[axis + 1]
            return rows.reshape(*rows.shape[:axis], tokens, *rows.shape[axis + 2 :])

        return jax.tree.map(gather, block, self.pages)

    def with_blocks(self, block: Tree, new: Tree, first: LengthsB, count: LengthsB) -> PagedBody:
        """Return the body with blocks first[b] .. first[b] + count[b] - 1 of each sequence b
        replaced by the leading blocks of `new`, whose arrays are as they are stored."""
        last = self.table.shape[1] - 1

        def put(spec: Any, pages: Array, new: Array) -> Array:
            axis, entries = spec.axis("tokens"), spec["tokens"].size
            width = new.shape[axis] // entries

            def write_block(i: Array, pages: Array) -> Array:
                # int64 if jax_enable_x64 is set, and an int of Python under jax.disable_jit
                i = jnp.asarray(i, first.dtype)
                b, place = i // width, i % width
                page = self.table[b, jnp.minimum(first[b] + place, last)]
                row = lax.dynamic_slice_in_dim(new, b, 1)
                row = lax.dynamic_slice_in_dim(row, place * entries, entries, axis)
                kept = lax.dynamic_slice_in_dim(pages, page, 1)
                row = jnp.where(place < count[b], row, kept)
                return lax.dynamic_update_slice_in_dim(pages, row, page, 0)

            return lax.fori_loop(0, len(new) * width, write_block, pages)

        return dataclasses.replace(self, pages=jax.tree.map(put, block, self.pages, new))
