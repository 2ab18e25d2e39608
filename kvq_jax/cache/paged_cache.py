"""A prototype: one layer's cache whose body lies in pages, as engines with block tables keep it.

    plan = paged_plan(layer_plan("kivi:bits=4", dims, layer=i, capacity=4096))
    cache = plan.init(pages=512, slots=8)
    out, cache = plan.attend(cache, table, q, k, v, prefill=True)

The caller decides which page is block i of a slot: table[slot, i]. A block is written once, when it
leaves the slot's recent window. So sequences that begin alike may share their pages up to there. A
page that is not written yet belongs to one slot. Exact tokens and lengths belong to slots.

Only XLA reads pages. They serve methods without statistics of a prompt, layers without a window
that is shorter than the capacity, and one device. docs/serving_hosts.md says what engines need
beyond that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.paged import Blocks, PagedBody
from kvq_jax.cache.accounting import nbytes
from kvq_jax.cache.cache import check_held
from kvq_jax.cache.call_layout import Rows
from kvq_jax.cache.layer_cache import LayerCache
from kvq_jax.cache.layer_plans import CachePlan
from kvq_jax.layer.plan import Sides
from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import int32, integer, positive
from kvq_jax.types.pytree import pytree


@pytree
@dataclasses.dataclass(frozen=True, eq=False)
class PagedCache:
    """The keys and values of one layer, a pytree of arrays alone. Build it with `PagedPlan.init`.

    Attributes:
        pages: the body's arrays for each codec, pages first.
        slots: the exact tokens and the length of each slot, slots first. Its body is empty.
    """

    pages: Sides
    slots: LayerCache


@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """The static description of a paged cache, with its functions, which are pure. Made by
    `paged_plan`.

    Attributes:
        plan: the same layer with a body of its own for each row.
    """

    plan: CachePlan

    @property
    def page_tokens(self) -> int:
        """Return the number of tokens of a page."""
        return self.plan.layer.regions.block

    @property
    def width(self) -> int:
        """Return the number of blocks of a full slot, which is the width of a table."""
        return self.blocks(self.plan.layer.regions.capacity)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page."""
        return nbytes(jax.eval_shape(lambda: self._pages(1)))

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot beside its pages."""
        return nbytes(jax.eval_shape(lambda: self._slots(1)))

    def blocks(self, tokens: int) -> int:
        """Return the number of pages that a sequence of `tokens` has written."""
        count = integer(tokens, 0)
        if count is None:
            raise ValueError(f"{tokens=} must be an integer of at least 0")
        return self.plan.layer.regions.aged_tokens(count) // self.page_tokens

    def init(self, pages: int, slots: int) -> PagedCache:
        """Return a cache of empty slots."""
        pages, slots = positive("pages", pages), positive("slots", slots)
        return PagedCache(self._pages(pages), jax.jit(lambda: self._slots(slots))())

    def attend(
        self, cache: PagedCache, table: Integers, q: Rows, k: Rows, v: Rows, **options: Any
    ) -> tuple[Any, ...]:
        """Add new tokens to the slots and return their attention, as `CachePlan.attend` does.

        Args:
            cache: the cache. It may be donated.
            table: [slots, width] integers, the page of each block. The blocks that the new tokens
                complete need a page. Entries beyond them may be any page. A traced entry cannot be
                checked, and is clamped.
            q, k, v: rows of all slots, as in `CachePlan.attend`.
            options: as there, but for `implementation`, which is "xla". A slot with lengths[b] = 0
                does not change.

        Returns:
            As `CachePlan.attend`.

        Raises:
            ValueError: as `CachePlan.attend`, and for a table that does not fit.
        """
        asked = options.pop("implementation", None)
        if asked not in (None, "xla"):
            raise ValueError(f"implementation={asked!r} reads no pages: leave it out")
        layer = self._joined(cache, table)
        *out, after = self.plan.attend(layer, q, k, v, implementation="xla", **options)
        pages = tuple(body.pages for body in after.state.body)
        return *out, PagedCache(pages, _without_body(after))

    def read(
        self, cache: PagedCache, table: Integers, **options: Any
    ) -> tuple[Float[Array, "B _ _ H"], Float[Array, "B _ _ H"]]:
        """Return the dequantized tokens of each slot, as `CachePlan.read` does."""
        return self.plan.read(self._joined(cache, table), **options)

    def fork(self, cache: PagedCache, source: Integers, target: Integers) -> PagedCache:
        """Return the cache with the exact tokens and the length of slot `source` in slot `target`.

        The target's row of the table must name the source's pages for its first `blocks(length)`
        blocks, and pages of its own after them. Traced numbers of slots cannot be checked.

        Raises:
            ValueError: if one is not the number of a slot.
        """
        _check_paged(cache)
        slots = len(cache.slots.lengths)
        source, target = (
            _slot(name, number, slots) for name, number in (("source", source), ("target", target))
        )

        def copied(array: Array) -> Array:
            return array.at[target].set(array[source])

        return dataclasses.replace(cache, slots=jax.tree.map(copied, cache.slots))

    def _pages(self, count: int) -> Sides:
        layer = self.plan.layer
        bodies = tuple(codec.body(count, layer.heads, self.page_tokens) for codec in layer.codecs)
        structs = jax.tree.map(lambda spec: spec.struct, bodies)
        return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), structs)

    def _slots(self, count: int) -> LayerCache:
        return _without_body(self.plan.init(count))

    def _joined(self, cache: PagedCache, table: Integers) -> LayerCache:
        """Return the cache with the pages as its body."""
        _check_paged(cache)
        pages, slots = len(jax.tree.leaves(cache.pages)[0]), cache.slots
        blocks = self._checked(table, len(slots.lengths), pages)
        body = tuple(PagedBody(arrays, blocks) for arrays in cache.pages)
        return dataclasses.replace(slots, state=dataclasses.replace(slots.state, body=body))

    def _checked(self, table: Integers, slots: int, pages: int) -> Blocks:
        blocks: Int[Array, "..."] = jnp.asarray(int32("table", table))
        if blocks.shape != (slots, self.width):
            raise ValueError(f"table must be [{slots}, {self.width}], got {list(blocks.shape)}")
        if not isinstance(blocks, Tracer) and blocks.size:
            lowest, highest = int(np.min(blocks)), int(np.max(blocks))
            if lowest < 0 or highest >= pages:
                raise ValueError(
                    f"table names pages from {lowest} to {highest}, but the cache has pages 0 to"
                    f" {pages - 1}"
                )
        return blocks


def _check_paged(cache: PagedCache) -> None:
    """Raise ValueError if this is not a cache of pages, or a call has consumed it."""
    if not isinstance(cache, PagedCache):
        raise ValueError(
            f"this call takes the PagedCache of PagedPlan.init, got {type(cache).__name__}"
        )
    check_held(cache)


def _slot(name: str, number: Integers, slots: int) -> Int[Array, ""]:
    index: Int[Array, "..."] = jnp.asarray(int32(name, number))
    if not isinstance(index, Tracer) and (index.ndim or not 0 <= int(index) < slots):
        raise ValueError(f"{name}={index}, but the cache has slots 0 to {slots - 1}")
    return index


def _without_body(cache: LayerCache) -> LayerCache:
    return dataclasses.replace(cache, state=dataclasses.replace(cache.state, body=()))


def paged_plan(plan: CachePlan) -> PagedPlan:
    """Return the plan of a layer whose body lies in pages.

    Args:
        plan: a layer's plan. Its capacity is that of a slot, and its block is a page.

    Raises:
        NotImplementedError: if the method takes statistics from a prompt, the body wraps around, or
            the plan has a placement.
    """
    layer = plan.layer
    statistics = [codec.statistics.spec(1, layer.heads) for codec in layer.codecs]
    reasons = (
        ("takes statistics from each prompt", jax.tree.leaves(statistics)),
        (f"keeps the newest blocks of a window of {layer.attention.window}", layer.regions.wraps),
        ("is placed on a mesh", plan.placement),
    )
    for reason, holds in reasons:
        if holds:
            raise NotImplementedError(
                f"no pages for {plan.spec!r}, because the layer {reason}: kvq.layer_plan serves it"
                " without pages"
            )
    return PagedPlan(plan)
