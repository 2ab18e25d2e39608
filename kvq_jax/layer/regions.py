"""The three regions of a cache's token axis, and the one rule by which tokens age.

    sink     the first `sink` tokens, full precision
    body     quantized, whole blocks
    recent   a full-precision ring of recent + block slots, fewer in a small capacity

    body(n) = floor(max(0, n - sink - recent) / block) * block     tokens in the body after n tokens

So the newest recent .. recent + block - 1 tokens are in full precision. A ring slot s holds the
newest token p with (p - sink) % slots == s.

If D shards split a body, its blocks are dealt out in turn: block g is block g // D of shard g % D.
So shards differ by at most one block, whatever the length, and the first blocks of a sequence are
the first ones of every shard.

The body of a layer with a sliding window wraps around if the window is shorter than the capacity:

    block g lies in slot g mod n,   n = ceil((window - recent + slack - 1) / block)

So it holds every token that a query sees, in a step of up to `slack` tokens and after a trim of up
to `slack` tokens, and its bytes do not depend on the capacity. One more slot is for the spare codes
of kept_codes.py. Like the ring, it is whole on every shard.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

N = TypeVar("N", int, Array)

SLACK = 64


@dataclasses.dataclass(frozen=True)
class Regions:
    """Static sizes in tokens. `capacity` counts all three regions together.

    window: the number of tokens that a query sees, itself included, or None for all.
    slack: tokens beyond the window for which a body that wraps around has room. Tests lower it.
    shards: the number of shards along the mesh axis `axis` to which the body's blocks are dealt
    out. A shard's program calls the methods about what it holds inside `jax.shard_map`.
    """

    sink: int
    recent: int
    block: int
    capacity: int
    window: int | None = None
    slack: int = SLACK
    shards: int = 1
    axis: str | None = None

    def aged_tokens(self, n: N) -> N:
        """Return the number of tokens in the body after n tokens (an int, or an integer array)."""
        aged = n - self.sink - self.recent
        aged = max(0, aged) if isinstance(aged, int) else jnp.maximum(aged, 0)
        return aged // self.block * self.block

    @property
    def body_capacity(self) -> int:
        """Return the number of body tokens of a full cache."""
        return self.aged_tokens(self.capacity)

    @property
    def block_slots(self) -> int:
        """Return n, the number of blocks that the body holds if it wraps around, else all."""
        blocks = self.body_capacity // self.block
        if self.window is None:
            return blocks
        needed = -(-(self.window - self.recent + self.slack - 1) // self.block)
        return needed if needed + 1 < blocks else blocks

    @property
    def wraps(self) -> bool:
        """Return True if newer blocks of the body take the slots of those that no query sees."""
        return self.block_slots < self.body_capacity // self.block

    @property
    def sink_slots(self) -> int:
        """Return the number of tokens that the sink has room for."""
        return min(self.sink, self.capacity)

    @property
    def ring_slots(self) -> int:
        """Return the number of tokens that the ring has room for, at least 1."""
        return max(1, min(self.recent + self.block, self.capacity - self.sink))

    def ring_slot(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the ring slot of a position that is in the ring."""
        return (position - self.sink) % self.ring_slots

    def ring_positions(self, lengths: Int[Array, "B"]) -> Int[Array, "B R"]:
        """Return the position that each ring slot holds after `lengths` tokens. It is below `sink`
        if the slot is still empty."""
        newest = lengths[:, None] - 1
        return (
            newest
            - (newest - self.sink - jnp.arange(self.ring_slots, dtype=jnp.int32)[None])
            % self.ring_slots
        )

    @property
    def held_capacity(self) -> int:
        """Return the number of body tokens that each shard has room for."""
        if self.wraps:
            return (self.block_slots + 1) * self.block
        return self.max_held(self.body_capacity // self.block) * self.block

    @property
    def read_capacity(self) -> int:
        """Return the number of body tokens of each shard that attention can read: all but the slot
        for spare codes, if the body wraps around."""
        return self.block_slots * self.block if self.wraps else self.held_capacity

    def max_held(self, blocks: int) -> int:
        """Return how many of `blocks` neighbouring blocks one shard holds at most."""
        return -(-blocks // self.shards)

    def held(self, body: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return how many of the first `body` body tokens (whole blocks) this shard holds. They are
        its first ones."""
        if self.shards == 1:
            return body
        blocks = body // self.block + self.shards - 1 - lax.axis_index(self.axis)
        return blocks // self.shards * self.block

    def body_token(self, index: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the body token that this shard holds at `index`."""
        if self.shards == 1:
            return index
        block = index // self.block * self.shards + lax.axis_index(self.axis)
        return block * self.block + index % self.block

    def held_index(self, token: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the index of a body token in the shard that holds it: the inverse of
        `body_token`."""
        if self.shards == 1:
            return token
        return token // (self.block * self.shards) * self.block + token % self.block

    def held_before(self, token: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return how many of the body tokens that this shard holds lie before `token`."""
        if self.shards == 1:
            return token
        whole = token // self.block * self.block
        return self.held(whole) + jnp.where(self.holds(whole), token - whole, 0)

    def place(self, block: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the place of a block among the blocks of the shard that holds it."""
        if not self.wraps:
            return self.held_index(block * self.block) // self.block
        spare = block >= self.body_capacity // self.block
        return jnp.where(spare, self.block_slots, block % self.block_slots)

    def oldest(self, body: N) -> N:
        """Return the first body token that is held once the first `body` ones were written."""
        if not self.wraps:
            return 0 * body
        first = body - self.block_slots * self.block
        return max(0, first) if isinstance(first, int) else jnp.maximum(first, 0)

    def tokens_at(self, index: Int[Array, " n"], body: Int[Array, "B"]) -> Int[Array, "#B n"]:
        """Return the body token at each of these indices of this shard once the first `body[b]`
        ones were written. It is negative if there is none yet."""
        if not self.wraps:
            return self.body_token(index)[None]
        newest, slot = body[:, None] // self.block - 1, index[None] // self.block
        block = newest - (newest - slot) % self.block_slots
        return block * self.block + index[None] % self.block

    def holds(self, token: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Return a mask of the body tokens that this shard, one of several, holds."""
        return token // self.block % self.shards == lax.axis_index(self.axis)

    def last_of_shard(self, block: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the last block for which the shard that holds `block` has room. If the body wraps
        around, it is one that no token reaches."""
        if self.wraps:
            return jnp.full_like(block, self.body_capacity // self.block)
        return (self.held_capacity // self.block - 1) * self.shards + block % self.shards

    def held_positions(self, first: Int[Array, "B"], count: int) -> Int[Array, "B count"]:
        """Return the positions of the `count` body tokens that this shard holds from index first[b]
        on."""
        if self.shards == 1:
            return (self.sink + first)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        return self.sink + self.body_token(
            first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        )
