"""Decode attention over the full-precision windows of a cache: the first tokens in the sink and the
newest ones in the ring.

    m, l, o of  softmax(q . K^T / sqrt(H)) V  over the tokens that no body holds, as one split
                (partial_attention.py), perhaps with a soft cap of scores and a sliding window

A ring of R slots after E sink tokens holds token p in slot (p - E) mod R. Of n tokens, limits[b]
after the sink are read from the body, and the other tokens of the ring here. One program reads both
windows of a KV head for all of its query heads, one tile of slots after another. It is one of the
programs of the kernel that appends the step's token (quantize/append.py), so the windows take one
launch.

Keys cached before RoPE are rotated to their positions p as they are read, in fp32, since the
position of a slot is known there:

    k_rot = a (k1 cos(p w) - k2 sin(p w), k2 cos(p w) + k1 sin(p w))
            k1, k2 the halves of a key's channels
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
from pallas_kernels.readers.shared import LOG2E, add_up, dot, real_columns, soft_capped
from pallas_kernels.tiles.arithmetic import exp2

DTYPES = ("bfloat16", "float16")
_TILE_ELEMENTS = 8192  # of the keys of one tile
# Of a tile: tensor cores take no fewer, so a smaller window is read with its last slot repeated.
_MIN_ROWS = 16

# inverse frequencies w and attention factor a, fp32
Rotation = tuple[Float[Array, " half"], Float[Array, ""]]


class WindowQueries(NamedTuple):
    """One query token of each sequence, and the window tokens that it attends to, which are those
    that the body does not hold.

    q, rotated keys and probabilities are rounded to the windows' dtype. Scores and sums are fp32.
    Slots without a token may hold anything.

    Args:
        q: [B, K, G, H], not scaled.
        tokens: the tokens of each row, including the query's own.
        limits: the tokens of each row that are in the body.
        rotation: for keys cached before RoPE. None for keys after RoPE.
        window: the tokens that a query sees, itself included, or None for all.
        soft_cap: the bound c of scores, c tanh(s / c), or None.
    """

    q: Float[Array, "B K G H"]
    tokens: Int[Array, " B"]
    limits: Int[Array, " B"]
    rotation: Rotation | None = None
    window: int | None = None
    soft_cap: float | None = None

    @property
    def warps(self) -> int:
        # Rotating takes four times as many instructions as all the rest.
        return 4 if self.rotation is None else 8

    def check(self, ring: Float[Array, "B K R H"]) -> None:
        """Raise ValueError for windows that kernels cannot read."""
        if ring.dtype.name not in DTYPES:
            raise ValueError(f"windows in {ring.dtype.name}: kernels read {' and '.join(DTYPES)}")
        if not ring.shape[2]:
            raise ValueError("a ring of 0 slots: the newest token needs one")

    def arrays(self, dtype: Any) -> tuple[Array, list[Array]]:
        """Return the queries [B, K, columns, H], padded with columns of zeros, and the arrays that
        all programs share.

        These are, for keys to be rotated, the units of H/2 frequencies (whole and rest) and the
        attention factor [1].
        """
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
        """Describe m, l and o of one split, for query heads padded to a power of two."""
        batch, heads, group, channels = self.q.shape
        real = pl.next_power_of_2(group)
        return [
            jax.ShapeDtypeStruct((batch, heads, 1, *rest), jnp.float32)
            for rest in ((real,), (real,), (channels, real))
        ]


class SlotToken(NamedTuple):
    """The position of the token in a slot, and whether it is a token to be read here."""

    position: Int[Array, " tile"]
    counts: Bool[Array, " tile"]


@runtime_checkable
class WindowRows(Protocol):
    """Keys or values of a window of a KV head, including the new token's."""

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
    window: int | None,
    soft_cap: float | None,
    asm: bool,
) -> None:
    """Attend to the windows of a KV head, in a kernel.

    Args:
        q: ref of the queries, [columns, H].
        shared: refs of the shared arrays of `WindowQueries`, whole.
        sink: keys and values, or nothing if the sink has no slots.
        ring: keys and values.
        tokens: the tokens of the row.
        limit: the tokens of the row that are in the body.
        parts: refs of m [R], l [R] and o [H, R], which are written.
        window, soft_cap: see `WindowQueries`.
        asm: compute with inline assembly.
    """
    units, factor, halves = None, 1.0, 1
    if shared:
        whole, rest, factor_ref = shared
        units, factor, halves = Units(whole[...], rest[...]), factor_ref[0], 2
    m_ref, l_ref, o_ref = parts
    columns, channels = q.shape
    # of the channels
    cuts = [pl.ds(half * (channels // halves), channels // halves) for half in range(halves)]
    queries, scale = [q[:, cut] for cut in cuts], factor * (LOG2E * channels**-0.5)
    first = sink[0].slots if sink else 0

    def of_sink(slot: Int[Array, " tile"]) -> SlotToken:
        return SlotToken(slot, slot < tokens)

    def of_ring(slot: Int[Array, " tile"]) -> SlotToken:
        count, newest = ring[0].slots, tokens - 1
        turns = (
            first // count + 2
        ) * count  # The added turns keep the dividend of the remainder from being negative.
        position = newest - lax.rem(newest - first - slot + turns, jnp.full_like(slot, count))
        return SlotToken(position, position >= first + limit)

    carry = (
        jnp.zeros((channels, columns), jnp.float32),
        jnp.full((columns,), NEG_INF, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
    )
    for (keys, values), token_of in [*([(sink, of_sink)] if sink else []), (ring, of_ring)]:
        count = keys.slots
        tile = min(max(_MIN_ROWS, 1 << (count.bit_length() - 1)), _TILE_ELEMENTS // channels)

        def step(
            i: Array,
            carry: Any,
            count=count,
            token_of=token_of,
            keys=keys,
            values=values,
            tile=tile,
        ) -> Any:
            sums, largest, total = carry
            slot, rows, fresh = _slots(i, tile, count)
            token = token_of(slot)
            seen = token.counts & fresh
            if window is not None:
                seen &= token.position >= tokens - window
            counts = seen[:, None]
            parts = [keys[rows, cut] for cut in cuts]
            if units is not None:
                parts = _rotated(parts, *at_positions(token.position, units))
            scores = add_up(dot(k, q, (1, 1)) for k, q in zip(parts, queries, strict=True)) * scale
            if soft_cap is not None:
                scores = soft_capped(scores, soft_cap, asm)
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
    """Return the slots of the i-th tile of a window, the index of the rows to read for them, and
    which slots no earlier tile has read.
    """
    # The last tile moves back, and masks the slots that an earlier tile has read.
    start = jnp.minimum(i * tile, max(count - tile, 0))
    slot = start + lax.broadcasted_iota(jnp.int32, (tile,), 0)
    rows = pl.ds(start, tile) if tile <= count else jnp.minimum(slot, count - 1)
    return slot, rows, (slot >= i * tile) & (slot < count)


def _rotated(
    halves: Sequence[Float[Array, "tile half"]],
    cos: Float[Array, "tile half"],
    sin: Float[Array, "tile half"],
) -> list[Float[Array, "tile half"]]:
    """Return the halves of keys after RoPE, in their own dtype and without the attention factor."""
    first, second = (half.astype(jnp.float32) for half in halves)
    return [
        half.astype(halves[0].dtype)
        for half in (first * cos - second * sin, second * cos + first * sin)
    ]
