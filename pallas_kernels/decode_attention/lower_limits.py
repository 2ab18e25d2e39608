"""The body tokens that queries with a window see, as tiles of the stored arrays hold them.

    row b sees the body tokens  lower[b] <= t < limits[b]

In a ring of R places token t lies at place t mod R, so a row sees at most two runs of places: a
segment of the round that its limit is in, and before it one of the round before. Segments take the
place of rows in schedule.py, in whose order the older one comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LowerLimits(NamedTuple):
    """The first body token that each row sees.

    Args:
        tokens: those tokens. Each row's is at most `ring` before its limit, if there is a ring.
        ring: R, or None if token t lies at place t. Places behind the ring may hold anything.
        q_before: for keys before RoPE, whose positions are counted from the ring's first place. q
            reads the round of the limit, q_before the round before. None: q reads both.
    """

    tokens: Int[Array, " B"]
    ring: int | None = None
    q_before: Float[Array, "B K G H"] | None = None

    @property
    def segments(self) -> int:
        return 1 if self.ring is None else 2

    def places(self, limits: Int[Array, " B"]) -> Int[Array, " L"]:
        """Return the end of each segment's places, and then the first place of each. Both are 0 for
        a segment without any."""
        first, end = self.tokens.astype(jnp.int32), limits.astype(jnp.int32)
        if self.ring is not None:
            begun = end // self.ring * self.ring
            firsts = first - (begun - self.ring), first - begun
            first = jnp.maximum(jnp.stack(firsts, axis=1), 0).reshape(-1)
            ends = jnp.full_like(end, self.ring), end - begun
            end = jnp.stack(ends, axis=1).reshape(-1)
        return jnp.where(jnp.tile(first < end, 2), jnp.concatenate([end, first]), 0)

    def queries(self, q: Float[Array, "B K G H"]) -> Float[Array, "L K G H"]:
        """Return the queries of each segment, or of each row if its segments share them."""
        if self.q_before is None:
            return q
        return jnp.stack([self.q_before.astype(q.dtype), q], axis=1).reshape(-1, *q.shape[1:])
