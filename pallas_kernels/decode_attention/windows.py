"""Decode attention over the full-precision windows of a cache: the sink's first tokens and the
ring's newest ones.

    m, l, o of  softmax(q . K^T / sqrt(H)) V  over the tokens that no body holds, as one split
                (partial_attention.py)

A ring of R slots after E sink tokens holds token p in slot (p - E) mod R. Of n tokens, limits[b]
after the sink are read from the body, and the ring's other tokens here. One program reads both
windows of a KV head for all of its query heads, a tile of slots after the other. It is one of the
programs of the kernel that appends the step's token (quantize/append.py), so that windows are one
launch.

Keys cached before RoPE are rotated to their positions p as they are read, in fp32, for a slot's
position is known where it is read:

    k_rot = a (k1 cos(p w) - k2 sin(p w), k2 cos(p w) + k1 sin(p w)),    k1, k2 the halves of a key's channels
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.angles import Units, at_positions, units_per_position
from pallas_kernels.decode_attention.partial_attention import NEG_INF, WEIGHT_EXPONENT
from pallas_kernels.readers.shared import LOG2E, add_up, dot, real_columns
from pallas_kernels.tiles.arithmetic import exp2

DTYPES = ("bfloat16", "float16")
_TILE_ELEMENTS = 8192  # of the keys of one tile
# of a tile: tensor cores take no fewer, so a smaller window is read with its last slot repeated
_LEAST_ROWS = 16

Rotation = tuple[
    Float[Array, " half"], Float[Array, ""]
]  # inverse frequencies w and attention factor a, fp32


class Queries(NamedTuple):
    """One query token of each sequence, and the tokens of its windows that it attends to: those
    that the body does not hold.

    q: not scaled. tokens [B]: that the row has, the query's own included; limits [B]: of them in
    the body. rotation: of keys cached before RoPE; None for keys after it. q, rotated keys and
    probabilities are rounded to the windows' dtype; scores and sums are fp32. What slots without a
    token hold is never used.
    """

    q: Float[Array, "B K G H"]
    tokens: Int[Array, " B"]
    limits: Int[Array, " B"]
    rotation: Rotation | None = None

    @property
    def warps(self) -> int:
        return (
            4 if self.rotation is None else 8
        )  # rotating takes four times as many instructions as all the rest

    def check(self, ring: Float[Array, "B K R H"]) -> None:
        """Raise ValueError for windows that are not read."""
        if ring.dtype.name not in DTYPES:
            raise ValueError(f"windows in {ring.dtype.name}: kernels read {' and '.join(DTYPES)}")
        if not ring.shape[2]:
            raise ValueError("a ring of 0 slots: the newest token needs one")

    def arrays(self, dtype: Any) -> tuple[Array, list[Array]]:
        """Return the queries [B, K, columns, H], with columns of zeros, and what all programs
        share: of keys to rotate the units of H/2 frequencies, whole and rest, and the attention
        factor [1]."""
        group = self.q.shape[2]
        padded = jnp.pad(
            self.q.astype(dtype),
            ((0, 0), (0, 0), (0, max(8, pl.next_power_of_2(group)) - group), (0, 0)),
        )
        return padded, (
            []
            if self.rotation is None
            else [*units_per_position(self.rotation[0]), self.rotation[1].reshape(1)]
        )

    @property
    def parts(self) -> list[jax.ShapeDtypeStruct]:
        """Describe m, l and o: of one split, for query heads padded to a power of two."""
        batch, heads, group, channels = self.q.shape
        real = pl.next_power_of_2(group)
        return [
            jax.ShapeDtypeStruct((batch, heads, 1, *rest), jnp.float32)
            for rest in ((real,), (real,), (channels, real))
        ]


class Held(NamedTuple):
    """The position of the token that a slot holds, and whether it is one of those that are read
    here."""

    position: Int[Array, " tile"]
    counts: Bool[Array, " tile"]


@runtime_checkable
class WindowRows(Protocol):
    """Keys or values of a window of a KV head, the new token's among them."""

    @property
    def slots(self) -> int: ...
    def __getitem__(self, index: tuple[Any, Any]) -> Float[Array, "tile columns"]: ...


def attend(
    q: Any,
    shared: Sequence[Any],
    sink: Sequence[WindowRows],
    ring: Sequence[WindowRows],
    tokens: Array,
    limit: Array,
    parts: Sequence[Any],
    asm: bool,
) -> None:
    """Attend to the windows of a KV head, in a kernel.

    q, shared: refs of the arrays of `Queries`, [columns, H] and whole. sink, ring: keys and values;
    a sink without slots has neither. parts: refs of m [R], l [R] and o [H, R], which are written.
    """
    units, factor, halves = None, 1.0, 1
    if shared:
        whole, rest, factor_ref = shared
        units, factor, halves = Units(whole[...], rest[...]), factor_ref[0], 2
    m_ref, l_ref, o_ref = parts
    columns, channels = q.shape
    cuts = [
        pl.ds(half * (channels // halves), channels // halves) for half in range(halves)
    ]  # of the channels
    queries, scale = [q[:, cut] for cut in cuts], factor * (LOG2E * channels**-0.5)
    first = sink[0].slots if sink else 0

    def of_sink(slot: Int[Array, " tile"]) -> Held:
        return Held(slot, slot < tokens)

    def of_ring(slot: Int[Array, " tile"]) -> Held:
        count, newest = ring[0].slots, tokens - 1
        turns = (
            first // count + 2
        ) * count  # so that the remainder is one of a number that is not negative
        position = newest - lax.rem(newest - first - slot + turns, jnp.full_like(slot, count))
        return Held(position, position >= first + limit)

    carry = (
        jnp.zeros((channels, columns), jnp.float32),
        jnp.full((columns,), NEG_INF, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
    )
    for (keys, values), holds in [*([(sink, of_sink)] if sink else []), (ring, of_ring)]:
        count = keys.slots
        tile = min(max(_LEAST_ROWS, 1 << (count.bit_length() - 1)), _TILE_ELEMENTS // channels)

        def step(
            i: Array, carry: Any, count=count, holds=holds, keys=keys, values=values, tile=tile
        ) -> Any:
            sums, largest, total = carry
            slot, rows, fresh = _slots(i, tile, count)
            held = holds(slot)
            counts = (held.counts & fresh)[:, None]
            parts = [keys[rows, cut] for cut in cuts]
            if units is not None:
                parts = _rotated(parts, *at_positions(held.position, units))
            scores = add_up(dot(k, q, (1, 1)) for k, q in zip(parts, queries, strict=True)) * scale
            scores = jnp.where(counts, scores, NEG_INF)
            new = jnp.maximum(largest, jnp.max(scores, axis=0) - WEIGHT_EXPONENT)
            weights = jnp.where(counts, exp2(scores - new[None, :], asm), 0.0)
            v = jnp.where(counts, values[rows, pl.ds(0, channels)], 0)
            shrink = exp2(largest - new, asm)
            sums = sums * shrink[None, :] + dot(v, weights.astype(v.dtype), (0, 0))
            return sums, new, total * shrink + jnp.sum(weights, axis=0)

        carry = lax.fori_loop(0, pl.cdiv(count, tile), step, carry)
    sums, largest, total = carry
    heads = m_ref.shape[0]
    o_ref[...] = real_columns(sums, heads)
    m_ref[...], l_ref[...] = (real_columns(x[None], heads).reshape(heads) for x in (largest, total))


def _slots(
    i: Array, tile: int, count: int
) -> tuple[Int[Array, " tile"], Any, Bool[Array, " tile"]]:
    """Return the slots of the i-th tile of a window, the index of the rows that are read for them,
    and which of them are read first now."""
    start = jnp.minimum(
        i * tile, max(count - tile, 0)
    )  # the last tile moves back; what an earlier one read does not count again
    slot = start + lax.broadcasted_iota(jnp.int32, (tile,), 0)
    rows = pl.ds(start, tile) if tile <= count else jnp.minimum(slot, count - 1)
    return slot, rows, (slot >= i * tile) & (slot < count)


def _rotated(
    halves: Sequence[Float[Array, "tile half"]],
    cos: Float[Array, "tile half"],
    sin: Float[Array, "tile half"],
) -> list[Float[Array, "tile half"]]:
    """Return the halves of keys after RoPE, in the dtype of those before it and without the
    attention factor."""
    first, second = (half.astype(jnp.float32) for half in halves)
    return [
        half.astype(halves[0].dtype)
        for half in (first * cos - second * sin, second * cos + first * sin)
    ]
