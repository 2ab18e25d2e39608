"""Watch the memory of an engine's slots: one layer after the other is compared with what it was at
its last turn, and the lengths with what the requests hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvq_jax.cache.cache import Cache
from kvq_jax.cache.verification import Seal, Seals, changes, seal, verify
from kvq_models.inference.engine.accepted import Accepted
from kvq_models.inference.engine.requests import Ticket

Run: TypeAlias = tuple[Ticket, int]


SHARE = 0.01  # of the time


class Sweep:
    """A sweep over the layers of the slots' cache. A bit that flips in what was sealed before is
    found when its layer's turn comes again, and a length that is wrong before the next step.

    Args:
        each: layers that are compared at a time.
        share: the part of the time that comparing may take. A sweep waits until it is within it.
    """

    def __init__(self, each: int = 1, share: float = SHARE):
        self._each, self._share, self._next, self._due = each, share, 0, 0.0
        self._seals: dict[int, tuple[list[Run | None], Seal]] = {}
        self._row: tuple[Run, Seals] | None = None

    def compile(self, cache: Cache, row: Cache) -> None:
        """Run every program once."""
        seal(cache)
        seal(row)

    def damaged(self, cache: Cache, slots: Sequence[Accepted | None]) -> set[int]:
        """Return the slots whose memory has changed. Call it between two steps."""
        tickets = [None if accepted is None else accepted.run for accepted in slots]
        expected = [0 if accepted is None else accepted.tokens_held for accepted in slots]
        lengths = np.array(cache.lengths)
        found = {
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
                found |= {
                    damage.row
                    for damage in changes(cache, layer, before, now)
                    if tickets[damage.row] is not None and tickets[damage.row] == runs[damage.row]
                }
            self._seals[layer] = tickets, now
        if turns:
            ended = time.monotonic()
            self._due = ended + (ended - started) * (1 / self._share - 1)
        return found

    def row_damaged(self, row: Cache, accepted: Accepted) -> bool:
        """Return True if the row of a prompt that is being read has changed since the last chunk.
        All layers are compared, because their parts may go to the store of prefixes."""
        known, self._row = self._row, None
        if known is not None and known[0] == accepted.run and verify(row, known[1]):
            return True
        if accepted.read:
            self._row = accepted.run, seal(row)
        return False

    def forget(self) -> None:
        """Begin anew, for other caches."""
        self._seals.clear()
        self._row = None
