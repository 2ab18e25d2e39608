"""Watch the memory of an engine's slots: one layer after the other is compared with what it was at
its last turn, and the lengths with what the requests hold.

A slot is sealed as it is filled, and all of its layers are compared before its answer ends. So a
flipped bit stays unseen no longer than an answer takes, unless it flips in a token that is newer
than its layer's last turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvq_jax.cache.cache import Cache, init_cache
from kvq_jax.cache.verification import Seal, Seals, changes, seal, verify
from kvq_models.inference.engine.accepted import Accepted, Counts
from kvq_models.inference.engine.requests import Ticket

Run: TypeAlias = tuple[Ticket, int]

CHECK_SHARE = 0.01  # share of run time spent on checking memory

_log = logging.getLogger("kvq.engine")


class Sweep:
    """A sweep over the layers of the slots' cache. A bit that flips in what was sealed before is
    found when its layer's turn comes again, and a length that is wrong before the next step.

    Args:
        each: layers that are compared at a time.
        share: the part of the time that comparing may take. A sweep waits until it is within it.
    """

    def __init__(self, each: int = 1, share: float = CHECK_SHARE):
        self._each, self._share, self._next, self._due = each, share, 0, 0.0
        self._seals: dict[int, tuple[list[Run | None], Seal]] = {}
        self._row: tuple[Run, Seals] | None = None
        self._empty: Seals = {}  # seals of a row without tokens

    def compile(self, cache: Cache, row: Cache) -> None:
        """Run every program once. The row is empty. Layers of equal plans share their program, and
        are equal while they are empty."""
        first = {plan: i for i, plan in reversed(list(enumerate(row.plans)))}
        seal(cache, sorted(first.values()))
        seal(cache, sorted(first.values()), row=0)
        sealed = seal(row, sorted(first.values()))
        self._empty = {i: sealed[first[plan]] for i, plan in enumerate(row.plans)}

    def empty(self, row: Cache, counts: Counts) -> Cache:
        """Return a row before its prompt, or a new one if it was damaged while it was empty."""
        if not self._empty:
            return row
        now = seal(row)
        if not int(row.lengths[0]) and all(
            np.array_equal(before, after)
            for layer, sealed in self._empty.items()
            for before, after in zip(sealed.sums, now[layer].sums, strict=True)
        ):
            return row
        _log.error("memory of an empty row was damaged; another one takes its place")
        counts.damaged += 1
        return init_cache(row.spec, row.dims, 1, row.capacity, row.dtype, row.placement)

    def fill(self, cache: Cache, slot: int, row: Cache, accepted: Accepted) -> None:
        """Take the seals of a row that takes the place of a slot of `cache`."""
        known = self._row
        seals = known[1] if known is not None and known[0] == accepted.run else seal(row)
        for layer, new in seals.items():
            runs, old = self._seals.get(layer) or (
                [None] * cache.batch,
                seal(cache, [layer])[layer],
            )
            runs = [*runs[:slot], accepted.run, *runs[slot + 1 :]]
            lengths, *sums = (np.array(array) for array in (old.lengths, *old.sums))
            for whole, of_row in zip((lengths, *sums), (new.lengths, *new.sums), strict=True):
                whole[slot] = of_row[0]
            self._seals[layer] = runs, Seal(lengths, tuple(sums))

    def slot_damaged(self, cache: Cache, slot: int, accepted: Accepted) -> bool:
        """Return True if any layer of a slot has changed."""
        sealed = {
            layer: before.of(slot)
            for layer, (runs, before) in self._seals.items()
            if runs[slot] == accepted.run
        }
        now = seal(cache, tuple(sealed), row=slot)
        return any(changes(cache, layer, sealed[layer], now[layer]) for layer in sealed)

    def damaged(self, cache: Cache, slots: Sequence[Accepted | None]) -> set[int]:
        """Return the slots whose memory has changed. Call it between two steps."""
        tickets = [None if accepted is None else accepted.run for accepted in slots]
        expected = [0 if accepted is None else accepted.tokens_held for accepted in slots]
        lengths = np.array(cache.lengths)
        changed = {
            slot
            for slot, run in enumerate(tickets)
            if run is not None and lengths[slot] != expected[slot]
        }
        started = time.monotonic()
        turns = min(self._each, len(cache.layers)) if started >= self._due else 0
        for _ in range(turns):
            layer, self._next = self._next, (self._next + 1) % len(cache.layers)
            now = seal(cache, [layer])[layer]
            if layer in self._seals:
                runs, before = self._seals[layer]
                changed |= {
                    damage.row
                    for damage in changes(cache, layer, before, now)
                    if tickets[damage.row] is not None and tickets[damage.row] == runs[damage.row]
                }
            self._seals[layer] = tickets, now
        if turns:
            ended = time.monotonic()
            self._due = ended + (ended - started) * (1 / self._share - 1)
        return changed

    def seal_row(self, row: Cache, accepted: Accepted) -> None:
        """Seal all layers of a row after a chunk of its prompt."""
        self._row = accepted.run, seal(row)

    def row_damaged(self, row: Cache, accepted: Accepted) -> bool:
        """Return True if the row of a prompt that is being read has changed since its last chunk.
        All layers are compared, because their parts may go to the store of prefixes."""
        known = self._row
        return known is not None and known[0] == accepted.run and bool(verify(row, known[1]))

    def forget(self) -> None:
        """Begin anew, for other caches."""
        self._seals.clear()
        self._row = None
