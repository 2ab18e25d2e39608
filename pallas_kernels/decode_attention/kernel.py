"""Decode attention over the body of a cache: split-K flash decoding.

    m, l, o of  softmax(q . K^T / sqrt(H)) V  over the first limits[b] tokens of each row b
                (partial_attention.py)

Scores may have a soft cap, c tanh(s / c), and rows a window, lower[b] <= t < limits[b].

A program reads its share of all live tiles (schedule.py). It reads each tile for all query heads of
a KV head, with online softmax in fp32. A second kernel merges the results of all programs
(merge.py). Readers (readers/base.py) interpret the stored arrays.

Contract. Any limits 0 <= limits[b] <= S, different in each row. S is at least one tile. Unless all
rows are in full precision, S is a multiple of 32, and of a group's tokens if groups run over
tokens. Unused capacity may hold anything and is never used. Query heads are padded to 8 columns or
the next power of two. H and both sides of every tile are powers of two. Arrays may be of any size:
beyond 2^32 bytes Pallas computes offsets with 64 bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.merge import merged
from pallas_kernels.decode_attention.partial_attention import PartialAttention
from pallas_kernels.decode_attention.run import attend_run, store_piece
from pallas_kernels.decode_attention.schedule import Pieces, Schedule, TileRun, Unit
from pallas_kernels.decode_attention.tuning import Tuning, tuning_for
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.mosaic import route as mosaic
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.shared import LOG2E
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import triton_call, whole_array_but

# The most bytes that the scores needed by outliers may take in one launch. If all heads need more,
# they are processed in several launches. An 8B model reaches this with 2M tokens in all rows
# together: a ninth of a layer of 4-bit KVQuant, in temporary memory that all layers share.
STORED_SCORES = 256 << 20


def decode_attention(
    q: Float[Array, "B K G H"],
    keys: tuple[Reader, Sequence[Array]],
    values: tuple[Reader, Sequence[Array]],
    limits: Int[Array, " B"],
    *,
    capacity: int,
    lower: LowerLimits | None = None,
    soft_cap: float | None = None,
    tuning: Tuning | None = None,
    launch: Launch = LAUNCH,
) -> PartialAttention:
    """Attend with one query token per sequence to the first limits[b] of `capacity` stored tokens.

    The contract is in the module's docstring. q, probabilities and dequantized values are rounded
    to fp16 (to their own dtype if rows are in full precision). Scores, sums and the merge are fp32.
    KV heads are processed in groups of `heads_at_once`.

    Args:
        q: [B, K, G, H], not scaled.
        keys: a reader and the stored arrays.
        values: a reader and the stored arrays.
        limits: the number of tokens that each row attends to.
        capacity: S, the number of tokens that the arrays have room for.
        lower: the first tokens that rows see, and the ring that the arrays are. None: they see all
            of the first limits[b] tokens, and token t lies at place t.
        soft_cap: c above, in natural units. None for none.
        tuning: None chooses `tuning_for` these readers.
        launch: how the kernels are launched.

    Raises ValueError if the tuning's tile does not fit the contract, or for lower limits with
    readers that take none.
    """
    heads, group = q.shape[1:3]
    at_once = heads_at_once(q, keys[0], values[0], capacity)
    of_groups: list[PartialAttention] = []
    for first in range(0, heads, at_once):
        if of_groups:  # The next heads' scores reuse the memory of these.
            q, o = lax.optimization_barrier((q, of_groups[-1].o))
            of_groups[-1] = of_groups[-1]._replace(o=o)
        of_heads = range(first, first + at_once)
        pieces = attention_in_pieces(
            q,
            keys,
            values,
            limits,
            capacity=capacity,
            lower=lower,
            soft_cap=soft_cap,
            heads=of_heads,
            tuning=tuning,
            launch=launch,
        )
        of_groups.append(
            values[0].values_of(merged(pieces, group, launch=launch), values[1], first)
        )
    if len(of_groups) == 1:
        return of_groups[0]
    return PartialAttention(
        *(jnp.concatenate(arrays, axis=1) for arrays in zip(*of_groups, strict=True))
    )


def heads_at_once(q: Float[Array, "B K G H"], k: Reader, v: Reader, capacity: int) -> int:
    """Return how many KV heads are attended to in one launch: all of them, or as many as have
    scores that fit in STORED_SCORES if outliers need the scores.
    """
    batch, heads, group, _ = q.shape
    if not (k.adds_scores or v.adds_values):
        return heads
    of_head = 4 * batch * pl.next_power_of_2(group) * capacity
    return next(
        (h for h in range(heads, 1, -1) if heads % h == 0 and h * of_head <= STORED_SCORES), 1
    )


def attention_in_pieces(
    q: Float[Array, "B K G H"],
    keys: tuple[Reader, Sequence[Array]],
    values: tuple[Reader, Sequence[Array]],
    limits: Int[Array, " B"],
    *,
    capacity: int,
    lower: LowerLimits | None = None,
    soft_cap: float | None = None,
    heads: range | None = None,
    tuning: Tuning | None = None,
    launch: Launch = LAUNCH,
) -> list[Pieces]:
    """Return the pieces that `decode_attention` merges: the result of each program, and the
    contribution of outliers to the values, if there are any.

    Args:
        heads: the KV heads that are attended to. None means all of them.
    """
    batch, all_heads, group, channels = q.shape
    heads = range(all_heads) if heads is None else heads
    by_mosaic = mosaic.pieces(
        q,
        keys,
        values,
        limits,
        capacity=capacity,
        lower=lower,
        soft_cap=soft_cap,
        heads=heads,
        tuning=tuning,
        launch=launch,
    )
    if by_mosaic is not None:
        return by_mosaic
    columns, real = max(8, pl.next_power_of_2(group)), pl.next_power_of_2(group)
    (k, k_stored), (v, v_stored) = keys, values
    segments = 1
    if lower is not None:
        _check_window(k, v)
        q, segments = lower.queries(q), lower.segments
    missing = columns - q.shape[2]
    padded = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, missing), (0, 0)))
    tuning = tuning or tuning_for(k, v, columns, capacity, launch.asm)
    _check(capacity, tuning.tile, k, v)
    # Padding is scaled too: XLA prepares queries of one size in one launch.
    scaled = padded[:, heads.start : heads.stop] * (LOG2E * channels**-0.5)
    more = None
    if k.adds_scores:
        more = k.more_scores(scaled, k_stored, limits, launch, real, first=heads.start)
    by_slots = real, capacity // SPAN, k.slots, SPAN // k.slots
    added = () if more is None else (more.reshape(batch, len(heads), *by_slots),)
    inputs = (k.query(padded, k_stored), k.arrays(k_stored), v.arrays(v_stored), added)
    counts = tuple(len(arrays) for arrays in inputs)
    limits = limits.astype(jnp.int32) if lower is None else lower.places(limits)
    # An array, so that one kernel serves all groups of heads.
    begin = [] if len(heads) == all_heads else [jnp.full((1,), heads.start, jnp.int32)]
    flat = [limits, *begin, *(array for arrays in inputs for array in arrays)]
    schedule = Schedule(
        tuning.programs(batch * len(heads), capacity),
        tuning.tile,
        batch * segments,
        len(heads),
        segments,
        lower is not None,
    )
    shapes = [
        jax.ShapeDtypeStruct((schedule.pieces, *shape), jnp.float32)
        for shape in ((real,), (real,), (channels, real))
    ]
    if v.adds_values:
        shapes.append(jax.ShapeDtypeStruct((batch, len(heads), *by_slots), jnp.float32))
    # The kept scores overwrite the scores that were added.
    m, l, o, *kept = triton_call(
        functools.partial(
            _kernel,
            readers=(k, v),
            counts=counts,
            schedule=schedule,
            all_heads=all_heads,
            capacity=capacity,
            soft_cap=soft_cap,
            asm=launch.asm,
            columns=columns,
        ),
        name="decode_attention",
        grid=(schedule.programs,),
        in_specs=[whole_array_but(0, array, ()) for array in flat],
        out_specs=[whole_array_but(0, shape, ()) for shape in shapes],
        out_shape=shapes,
        launch=launch,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        aliases=({len(flat) - 1: 3} if added and v.adds_values else {}),
    )(*flat)
    pieces = [Pieces(m, l, o, limits, schedule)]
    if kept:
        pieces += v.more_values(
            kept[0].reshape(batch, len(heads), real, capacity),
            v_stored,
            limits,
            launch,
            heads.start,
        )
    return pieces


def _check_window(k: Reader, v: Reader) -> None:
    for reader in (k, v):
        if not reader.reads_windows:
            raise ValueError(f"{type(reader).__name__} takes no lower limits")


def _check(capacity: int, tile: int, k: Reader, v: Reader) -> None:
    if capacity % SPAN and (k.packed or v.packed):
        raise ValueError(f"{capacity=}: packed rows come in whole spans of {SPAN} tokens")
    minimum = max(k.min_tile, v.min_tile)
    if not minimum <= tile <= capacity or tile & (tile - 1):
        raise ValueError(f"{tile=} is not a power of two from {minimum} to {capacity=}")
    longest = min(
        (reader.longest_tile for reader in (k, v) if reader.longest_tile is not None), default=tile
    )
    if k.parts != v.parts:
        raise ValueError(
            f"{type(k).__name__} and {type(v).__name__} read a tile in {k.parts} and {v.parts}"
            " parts"
        )
    if tile > longest:
        raise ValueError(
            f"{tile=}: these keys and values are read in tiles of at most {longest} tokens"
        )


def _kernel(
    limits_ref: Any,
    *refs: Any,
    readers: tuple[Reader, Reader],
    counts: Any,
    schedule: Schedule,
    all_heads: int,
    capacity: int,
    soft_cap: float | None,
    asm: bool,
    columns: int,
) -> None:
    # refs: the first KV head [1] if the arrays hold other heads too. Then the arrays of the query,
    # the keys and the values, and the scores to add (by slots) if there are any. Then m [P, R], l
    # [P, R] and o [P, H, R] of all pieces, and room for all scores (by slots) if the values need
    # them.
    head = 0
    if schedule.heads < all_heads:
        head, refs = refs[0][0], refs[1:]
    inputs, outputs = refs[: sum(counts)], refs[sum(counts) :]
    ends = [sum(counts[: i + 1]) for i in range(4)]
    whole = dataclasses.replace(schedule, heads=all_heads)

    def read(run: TileRun, place: Callable[[], Array]) -> None:
        of_unit = [Unit(ref, run.row, run.head + head, whole) for ref in inputs[: ends[2]]]
        of_scores = [
            Unit(ref, run.row, run.head, schedule) for ref in (*inputs[ends[2] :], *outputs[3:])
        ]
        query, keys, values = (
            of_unit[last - count : last] for last, count in zip(ends, counts[:3], strict=False)
        )
        added, kept = of_scores[: counts[3]], of_scores[counts[3] :]
        inputs_of_run = query, keys, values, added, kept
        carry = attend_run(
            run, *inputs_of_run, readers, schedule.tile, capacity, soft_cap, asm, columns
        )
        store_piece(outputs[:3], place(), *carry)

    schedule.for_each_run(limits_ref, read)
