"""Choose slots and capacity that fit a number of bytes, counted from the layout of the caches.
Nothing is allocated."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from jax.typing import DTypeLike

from kvq_jax.cache.accounting import nbytes
from kvq_jax.cache.cache import layout
from kvq_jax.cache.spec import CacheSpec
from kvq_models.inference.engine.limits import CAPACITY_STEP, MAX_SLOTS, SLOTS
from kvq_models.llama.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class EngineSize:
    """The size of an engine.

    `nbytes` counts exactly what `Engine` allocates: `cache_bytes` for the slots' cache and the row
    in which prompts are read, and fp32 logits for each of their rows. It does not count weights and
    the working memory of a step.
    """

    slots: int
    capacity: int
    nbytes: int
    cache_bytes: int


def engine_size(
    spec: CacheSpec | str,
    config: LlamaConfig,
    *,
    memory: int | None = None,
    slots: int | None = None,
    capacity: int | None = None,
    dtype: DTypeLike | None = None,
) -> EngineSize:
    """Choose the slots and the capacity that are not given. The default capacity is the length up
    to which the model computes sequences as in training. The default is 8 slots.

    With `memory` (in bytes), choose as many slots as fit, at most 64, or for given slots the
    largest capacity that fits, a multiple of 64. Raises ValueError, in one line, if the arguments
    do not fit the memory.
    """

    def caches(slots: int, capacity: int) -> int:
        return sum(nbytes(layout(spec, config, rows, capacity, dtype)) for rows in (slots, 1))

    def total(slots: int, capacity: int) -> int:
        logits = (slots + 1) * config.vocab_size * np.dtype(np.float32).itemsize
        return caches(slots, capacity) + logits

    def fits(slots: int, capacity: int) -> bool:
        return memory is None or total(slots, capacity) <= memory

    longest = capacity or config.positions
    if memory is None:
        chosen = slots or SLOTS, longest
    elif slots is None and fits(1, longest):
        each = total(2, longest) - total(1, longest)
        chosen = min(MAX_SLOTS, (memory - total(1, longest)) // each + 1), longest
    else:
        rows = slots or 1
        whole = fits(rows, longest)
        chosen = rows, longest if whole else _largest(lambda n: fits(rows, n), longest)
        if not chosen[1] or (capacity is not None and chosen[1] < capacity):
            asked = slots or 1, capacity or CAPACITY_STEP
            fitting = (
                f"up to {chosen[1]} tokens fit" if chosen[1] else "give more, or a smaller cache"
            )
            raise ValueError(
                f"{asked[0]} slot{'s' * (asked[0] > 1)} of {asked[1]} tokens, and a row to read"
                f" prompts in, take {total(*asked)} bytes with {str(spec)!r}, and the memory has"
                f" {memory} bytes: {fitting}"
            )
    return EngineSize(*chosen, nbytes=total(*chosen), cache_bytes=caches(*chosen))


def _largest(fits: Callable[[int], bool], longest: int) -> int:
    """Return the largest multiple of CAPACITY_STEP below `longest` that fits, or 0 if none does."""
    steps = range(1, -(-longest // CAPACITY_STEP))
    return CAPACITY_STEP * bisect_left(steps, True, key=lambda n: not fits(n * CAPACITY_STEP))
