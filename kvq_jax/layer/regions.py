"""The three regions of a cache's token axis, and the one rule by which tokens age.

    [ sink: first `sink` tokens, full precision | body: quantized, whole blocks | recent: full-precision ring of recent + block slots ]

    body(n) = floor(max(0, n - sink - recent) / block) * block        tokens in the body after n tokens

So the newest recent .. recent + block - 1 tokens are in full precision. A ring slot s holds the newest token p with
(p - sink) % slots == s.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Int

N = TypeVar("N", int, Array)


@dataclasses.dataclass(frozen=True)
class Regions:
    """Static sizes in tokens. `capacity` counts all three regions together."""

    sink: int
    recent: int
    block: int
    capacity: int

    def body(self, n: N) -> N:
        """Return the number of tokens in the body after n tokens (an int, or an integer array)."""
        aged = n - self.sink - self.recent
        aged = max(0, aged) if isinstance(aged, int) else jnp.maximum(aged, 0)
        return aged // self.block * self.block

    @property
    def body_capacity(self) -> int:
        return self.body(self.capacity)

    @property
    def sink_slots(self) -> int:
        return min(self.sink, self.capacity)

    @property
    def ring_slots(self) -> int:
        return max(1, min(self.recent + self.block, self.capacity - self.sink))

    def ring_slot(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        return (position - self.sink) % self.ring_slots

    def ring_positions(self, lengths: Int[Array, "B"]) -> Int[Array, "B R"]:
        """Return the position that each ring slot holds after `lengths` tokens; below `sink` where the slot is still empty."""
        newest = lengths[:, None] - 1
        return newest - (newest - self.sink - jnp.arange(self.ring_slots)[None]) % self.ring_slots
