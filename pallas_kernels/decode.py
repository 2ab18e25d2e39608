"""Decode attention over the body of a cache: split-K flash decoding.

    o, m, l = parts of  softmax(q . K^T / sqrt(H)) V  over the first limits[b] tokens of each row b

One program reads one split of the tokens of one KV head, for all of its query heads, with online softmax in fp32. The splits' parts are
merged exactly outside (`merge_splits`), by a few small kernels of XLA. What the stored arrays mean is the sides' matter (sides.py).

Contract. Any limits 0 <= limits[b] <= S, different in each row. S is at least one tile and, unless all rows are exact, a multiple of 32
(of a group's tokens, where groups run over tokens); what lies in unused capacity is never used, whatever it is. Query heads are padded to
8 columns or the next power of two. H and all tile sides are powers of two. Arrays may be of any size: beyond 2^32 bytes Pallas computes
offsets with 64 bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels._launch import LAUNCH, Launch, launch, whole_array_but
from pallas_kernels.arithmetic import exp2
from pallas_kernels.codebook import Codebook
from pallas_kernels.parts import LOG2E
from pallas_kernels.polar import Polar
from pallas_kernels.rotary import LONGEST_TILE, Rotated
from pallas_kernels.sides import Dense, Grouped, Side
from pallas_kernels.tile import SPAN, Tile, change_slots

NEG = -1e30  # stands for -inf: finite, so that a part without any token merges without nan
LN2 = 0.6931471805599453


class Part(NamedTuple):
    """m the largest score, l = sum exp(s - m), o = sum exp(s - m) v: [B, K, G, 1], [B, K, G, 1], [B, K, G, H], fp32."""

    m: Float[Array, "B K G 1"]
    l: Float[Array, "B K G 1"]  # noqa: E741  # the name of this sum everywhere in the literature
    o: Float[Array, "B K G H"]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What changes only the speed. tile: tokens of a loop step; warps and stages: Triton's; cores: multiprocessors, None for as many as the
    device has; resident: programs that run on one of them at a time. The number of splits follows from both (docs/kernels.md)."""

    tile: int = 128
    warps: int = 1
    stages: int = 3
    cores: int | None = None
    resident: int = 8

    def splits(self, programs: int, capacity: int) -> int:
        """Splits of the token axis for `programs` rows times KV heads, at least two tiles in each.

        The number that takes the least time: programs run in rounds of as many as the device holds at a time, and each reads its tiles,
        after as long as one takes to arrive. A few programs more than a round would keep the device as long as two."""
        running = (device_cores() if self.cores is None else self.cores) * self.resident
        tiles = capacity // self.tile
        most = max(1, min(tiles // 2, 4 * pl.cdiv(running, programs)))
        return min(range(1, most + 1), key=lambda splits: pl.cdiv(programs * splits, running) * (pl.cdiv(tiles, splits) + 1))


def device_cores() -> int:
    """Multiprocessors of the device that this process runs on; those of an H200 where that is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or H200_CORES


TUNING = Tuning()

H200_CORES = 132
WARPS = 8  # that a multiprocessor's 65536 registers hold, of kernels that use 255
SHARED_BYTES = 233472  # of a multiprocessor of Hopper
OTHER_SHARED_BYTES = 3072  # of a program: for rearranging, and what the system keeps

# (tokens of a step, stages) by head dim and code bits, for codes without a zero and with one: the most that a program's 255 registers hold
# without spilling in the loop, counted from machine code (docs/kernels.md). Larger steps leave fewer loads that are not asynchronous.
_STEPS = {
    (128, 2): ((128, 3), (128, 3)),
    (128, 3): ((128, 2), (64, 3)),
    (128, 4): ((128, 3), (64, 3)),
    (128, 5): ((64, 3), (64, 3)),
    (128, 8): ((64, 2), (64, 2)),
    (256, 2): ((64, 3), (64, 3)),
    (256, 3): ((32, 3), (32, 3)),
    (256, 4): ((32, 3), (32, 3)),
    (256, 5): ((32, 3), (32, 3)),
    (256, 8): ((32, 2), (32, 2)),
}


def tuning_for(k: Side, v: Side, channels: int, columns: int, capacity: int, asm: bool) -> Tuning:
    """The usual step for these sides, no larger than the capacity, and how many such programs a multiprocessor holds."""
    chosen = [_step(side, channels) for side in (k, v)]
    tile, stages = min(tile for tile, _ in chosen), min(stages for _, stages in chosen)
    if columns > 8:
        tile //= 2
    if not asm and any(isinstance(side, Rotated) or (isinstance(side, Codebook) and side.planes.bits == 4) for side in (k, v)):
        tile //= 2  # selects, and rotated keys, hold more at a time than assembly
    while tile > capacity:
        tile //= 2
    # cosines in array operations: one warp does not hold the smallest step of 256 channels
    warps = 2 if isinstance(k, Polar) and channels == 256 else 1
    tile = max(tile, SPAN)
    resident = min(WARPS // warps, SHARED_BYTES // shared_bytes(k, v, channels, tile, stages))
    return Tuning(tile, warps, stages, resident=max(1, resident))


def shared_bytes(k: Side, v: Side, channels: int, tile: int, stages: int) -> int:
    """What a program takes of a multiprocessor's shared memory, estimated: within an eighth of what most compiled kernels ask for. Those
    with tables ask for more, but registers limit them; 2-bit keys in groups of 64 and 128 tokens for twice as much, 25 and 49 KB. A tile of
    both sides for each stage but the one in registers, one more of exact values, which dots read where they lie, and what rearranging
    takes."""
    keys, values = (row_bytes(side, channels) for side in (k, v))
    return (stages - 1) * tile * (keys + values) + (tile * values if isinstance(v, Dense) else 0) + OTHER_SHARED_BYTES


def row_bytes(side: Side, channels: int) -> int:
    """Bytes that a token takes of a tile; the few of a table's statistics, and of polar groups', are not counted."""
    if isinstance(side, Rotated):
        return row_bytes(side.inner, channels)
    if isinstance(side, Dense):
        return 2 * channels
    assert isinstance(side, Grouped | Codebook | Polar), side
    words = side.planes.bits * side.planes.channels // 8
    return words + (2 if side.centre is None else 1) * 2 * channels // side.group if isinstance(side, Grouped) else words


def _step(side: Side, channels: int) -> tuple[int, int]:
    if isinstance(side, Rotated):
        tile, stages = _step(side.inner, channels)
        return (tile // 2 if isinstance(side.inner, Codebook) and side.inner.planes.bits == 4 else min(tile, 8192 // channels)), stages
    if isinstance(side, Grouped):
        tile, stages = _STEPS.get((channels, side.planes.bits), ((128, 3), (128, 3)))[side.centre is None]
        # two groups of 64 with zeros spill in the loop, where one does not, nor do four of 32
        halved = side.axis == "tokens" and side.group == 64 and side.centre is None
        return (min(tile, 64) if halved else tile), stages
    if isinstance(side, Polar):
        return 4096 // channels, 3
    return 8192 // channels, 2 if isinstance(side, Codebook) and side.planes.bits == 4 else 3


def decode_attention(
    q: Float[Array, "B K G H"],
    keys: tuple[Side, Sequence[Array]],
    values: tuple[Side, Sequence[Array]],
    limits: Int[Array, " B"],
    *,
    capacity: int,
    tuning: Tuning | None = None,
    how: Launch = LAUNCH,
) -> Part:
    """Attention of one query token of each sequence over its first limits[b] of `capacity` stored tokens; contract above.

    q [B, K, G, H], not scaled. keys, values: a side and its stored arrays. Rounds q, probabilities and dequantized values to fp16 (Dense:
    to the stored dtype); scores, sums and the merge are fp32. ValueError where the tuning's tile does not fit the contract.
    """
    batch, heads, group, channels = q.shape
    columns = max(8, pl.next_power_of_2(group))
    padded = _padded(q.astype(jnp.float32), columns)
    (k, k_stored), (v, v_stored) = keys, values
    tuning = tuning or tuning_for(k, v, channels, columns, capacity, how.asm)
    _check(capacity, tuning.tile, k, v)
    more = k.more_scores(q.astype(jnp.float32) * (LOG2E * channels**-0.5), k_stored, limits, how)
    by_slots = pl.next_power_of_2(group), capacity // SPAN, k.slots, SPAN // k.slots
    added = () if more is None else (_padded(more, by_slots[0]).reshape(batch, heads, *by_slots),)
    inputs = (k.query(padded, k_stored), k.arrays(k_stored), v.arrays(v_stored), added)
    counts = tuple(len(arrays) for arrays in inputs)
    flat = [array for arrays in inputs for array in arrays]
    splits = tuning.splits(batch * heads, capacity)
    count, width = v.chunks
    outputs = [(count, width, columns), (columns,), (columns,)]
    shapes = [jax.ShapeDtypeStruct((batch, heads, splits, *shape), jnp.float32) for shape in outputs]
    if v.adds_values:
        shapes.append(jax.ShapeDtypeStruct((batch, heads, *by_slots), jnp.float32))
    out, largest, total, *scores = launch(
        functools.partial(_kernel, sides=(k, v), counts=counts, tuning=tuning, capacity=capacity, asm=how.asm, columns=columns),
        name="decode_attention",
        grid=(batch, heads, splits),
        in_specs=[pl.BlockSpec((1,), lambda b, h, s: (b,)), *(whole_array_but(2, array, (0, 1), (batch, heads)) for array in flat)],
        out_specs=[*(whole_array_but(3, shape, (0, 1, 2)) for shape in shapes[:3]), *(whole_array_but(2, s, (0, 1)) for s in shapes[3:])],
        out_shape=shapes,
        how=how,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )(limits.astype(jnp.int32), *flat)
    part = merge_splits(out[..., :group], largest[..., :group], total[..., :group])
    if not scores:
        return part
    kept = scores[0].reshape(batch, heads, -1, capacity)[:, :, :group]
    more = v.more_values(jnp.exp(kept * LN2 - part.m), v_stored, limits)
    return part if more is None else part._replace(o=part.o + more)


def _check(capacity: int, tile: int, k: Side, v: Side) -> None:
    packed = not (isinstance(k, Dense) and isinstance(v, Dense))
    if capacity % SPAN and packed:
        raise ValueError(f"{capacity=}: packed rows come in whole spans of {SPAN} tokens")
    if not SPAN <= tile <= capacity or tile & (tile - 1):
        raise ValueError(f"{tile=} is no power of two from {SPAN} to {capacity=}")
    if isinstance(k, Rotated) and tile > LONGEST_TILE:
        raise ValueError(f"{tile=}: keys before RoPE are turned in tiles of at most {LONGEST_TILE} tokens")


def _padded(rows: Float[Array, "B K G X"], count: int) -> Float[Array, "B K R X"]:
    return jnp.pad(rows, ((0, 0), (0, 0), (0, count - rows.shape[2]), (0, 0)))


def merge_splits(out: Float[Array, "B K P C W G"], largest: Float[Array, "B K P G"], total: Float[Array, "B K P G"]) -> Part:
    """The part of all splits P together, exactly, from their (o, m, l); m comes in units of log2."""
    m = jnp.max(largest, axis=2, keepdims=True)
    shrink = jnp.exp2(largest - m)
    o = jnp.sum(out * shrink[:, :, :, None, None], axis=2)  # [B, K, C, W, G]
    o = jnp.moveaxis(o, 4, 2).reshape(*m.shape[:2], m.shape[3], -1)
    return Part(m[:, :, 0, :, None] * LN2, jnp.sum(total * shrink, axis=2)[..., None], o)


def _kernel(
    limit_ref: Any, *refs: Any, sides: tuple[Side, Side], counts: Any, tuning: Tuning, capacity: int, asm: bool, columns: int
) -> None:
    # refs: query arrays, key arrays, value arrays, perhaps more scores (by slots), then o [C, W, G], m [G], l [G] of this program's split,
    # and perhaps where all scores go (by slots)
    ends = [sum(counts[: i + 1]) for i in range(4)]
    query, keys, values, added = (refs[end - count : end] for end, count in zip(ends, counts, strict=True))
    o_ref, m_ref, l_ref, *kept = refs[ends[3] :]
    k, v = sides
    size, splits = tuning.tile, pl.num_programs(2)
    limit = limit_ref[0]
    per_split = pl.cdiv(pl.cdiv(limit, splits), size)  # tiles
    first = pl.program_id(2) * per_split
    end = jnp.minimum((first + per_split) * size, limit)
    whole, tiles = jnp.maximum(end - first * size, 0) // size, pl.cdiv(jnp.maximum(end - first * size, 0), size)

    def step(tile: Tile, carry: Any) -> Any:
        sums, largest, total = carry
        scores = k.scores(query, keys, tile, asm)
        if added:
            scores = [s + _more(added[0], tile, k.slots, a, columns) for a, s in enumerate(scores)]
        for ref in kept:
            for a, s in enumerate(scores):
                _keep(ref, s, tile, k.slots, a)
        if tile.masked:
            scores = [jnp.where(tile.counts(tile.slot_tokens(k.slots, a))[:, None], s, NEG) for a, s in enumerate(scores)]
        new = jnp.maximum(largest, jnp.max(functools.reduce(jnp.maximum, scores), axis=0))
        shrink = exp2(largest - new, asm)
        weights = [exp2(s - new[None, :], asm) for s in scores]
        total = total * shrink + jnp.sum(functools.reduce(jnp.add, weights), axis=0)
        sums = [x * shrink[None, :] for x in sums]
        return v.weigh(change_slots(weights, v.slots), values, tile, sums, asm), new, total

    def whole_tile(i: Array, carry: Any) -> Any:
        return step(Tile(size, (first + i) * size, first + i), carry)

    def last_tile(i: Array, carry: Any) -> Any:
        start = (first + i) * size  # the window is moved back to stay inside the arrays; what an earlier tile read does not count again
        return step(Tile(size, jnp.minimum(start, capacity - size), None, start, end), carry)

    count, width = v.chunks
    carry = (
        [jnp.zeros((width, columns), jnp.float32)] * count,
        jnp.full((columns,), NEG, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
    )
    carry = lax.fori_loop(0, whole, whole_tile, carry)
    sums, largest, total = lax.fori_loop(whole, tiles, last_tile, carry)
    for c in range(count):
        o_ref[c, :, :] = sums[c]
    m_ref[...] = largest
    l_ref[...] = total


def _rows_of_slot(tile: Tile, slot: int) -> tuple[Any, ...]:
    """Indexes the tokens of a slot in scores [R, S / SPAN, slots, SPAN / slots], R query heads, padded to a power of two."""
    return slice(None), pl.ds(tile.offset(SPAN), tile.size // SPAN), pl.ds(slot, 1), slice(None)


def _more(ref: Any, tile: Tile, slots: int, slot: int, columns: int) -> Float[Array, "rows columns"]:
    """The scores that are to be added for the tokens of a slot."""
    heads, rows = ref.shape[0], tile.size // slots
    found = jnp.swapaxes(ref[_rows_of_slot(tile, slot)].reshape(heads, rows), 0, 1)
    return jnp.broadcast_to(found[:, None], (rows, columns // heads, heads)).reshape(rows, columns)


def _keep(ref: Any, scores: Float[Array, "rows columns"], tile: Tile, slots: int, slot: int) -> None:
    """Stores the scores of the tokens of a slot that count."""
    (rows, columns), heads = scores.shape, ref.shape[0]
    if columns > heads:
        copy = lax.broadcasted_iota(jnp.int32, (1, columns // heads, 1), 1)
        scores = jnp.sum(jnp.where(copy == 0, scores.reshape(rows, columns // heads, heads), 0.0), axis=1)
    shape = heads, rows * slots // SPAN, 1, SPAN // slots
    counts = jnp.broadcast_to(tile.counts(tile.slot_tokens(slots, slot)).reshape(1, *shape[1:]), shape) if tile.masked else None
    plt.store(ref.at[_rows_of_slot(tile, slot)], jnp.swapaxes(scores, 0, 1).reshape(shape), mask=counts)
