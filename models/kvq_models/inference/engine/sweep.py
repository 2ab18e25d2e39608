"""Watch the memory of an engine's slots: one layer a step is compared with what it was at its last
turn, and the lengths with what the requests hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvq_jax.cache.cache import Cache
from kvq_jax.cache.verification import Seal, Seals, changes, seal, verify
from kvq_models.inference.engine.accepted import Accepted
from kvq_models.inference.engine.requests import Ticket

Run: TypeAlias = tuple[Ticket, int]


class Sweep:
    """A sweep over the layers of the slots' cache. A bit that flips in what was sealed before is
    found when its layer's turn comes again: after as many steps as there are layers, or after
    `each` layers a step, sooner."""

    def __init__(self, each: int = 1):
        self._each, self._next = each, 0
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
        for _ in range(min(self._each, len(cache.layers))):
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
