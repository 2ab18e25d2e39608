"""A new token enters a layer's windows and the block that leaves them is quantized into the body: one launch for keys and values.

The arithmetic of blocks is that of kernel.py, program by program; only where rows are read and words are written differs. All arrays are
updated in place: what is not written keeps its memory, and where nothing leaves, one row of each window is all that is written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.quantize.kernel import QUANTIZE_TUNING, Packed, channel_kernel, check_format, token_kernel
from pallas_kernels.quantize.rounding import Job, Scheme
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import triton_call, whole_array_but


class Side(NamedTuple):
    """Keys or values: what is stored, the new row, and how a block is quantized, or the body that takes the row as it is. Without `blocks`
    only the windows are written."""

    row: Float[Array, "B K 1 H"]
    sink: Float[Array, "B K E H"]
    ring: Float[Array, "B K R H"]
    blocks: Blocks | Rows | None


class Blocks(NamedTuple):
    """A body and its quantizer; the last four are arguments of `quantize_rows`."""

    body: Packed
    reader: GroupedReader
    scheme: Scheme
    bits: int
    divisor: Float[Array, "B K 1 H"] | None


class Rows(NamedTuple):
    """A body of rows in full precision, whose blocks are one token: the new token leaves its window at once."""

    body: Float[Array, "B K S H"]


class Places(NamedTuple):
    """Where rows of the batch stand. position: of the new token; new: whether there is one; first: the first token of the block that
    leaves, counted after the sink; place: of it in the body, which may be a shard of every D-th block; leaving: whether one does."""

    position: Int[Array, " B"]
    new: Bool[Array, " B"]
    first: Int[Array, " B"]
    place: Int[Array, " B"]
    leaving: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class _Work:
    """The programs and arrays of one side. start, units: its programs, of which each quantizes `unit` tokens; sink, ring: their slots.
    copies: the body takes the row as it is."""

    start: int
    units: int
    unit: int
    sink: int
    ring: int
    job: Job | None
    copies: bool
    inputs: int
    stored: int


def append_token(sides: Sequence[Side], places: Places, *, block: int, launch: Launch = LAUNCH) -> tuple[Side, ...]:
    """Return the sides with each row's new token in its window, and with tokens first .. first + block - 1 in the body where they leave.

    Slot s of a ring of R slots, after E sink tokens, holds a token p with (p - E) mod R = s; R is a multiple of what a program quantizes, a
    group of tokens or SPAN of them, so that a block wraps only between two programs. The block that leaves does not hold the new token.
    first, place: multiples of the block. Equations and exactness are
    those of `quantize_rows`. A body of rows takes the new one at `place` where it leaves. Raises ValueError where the kernel cannot serve
    the format, or a block does not fit the ring.
    """
    batch, heads, _, channels = sides[0].row.shape
    works, inputs, stored, rows = list[_Work](), list[Array](), list[Array](), _new_rows(sides)
    start, warps = 0, 1
    for side in sides:
        given, kept, slots = list[Array](), [side.sink, side.ring] if side.sink.shape[2] else [side.ring], side.ring.shape[2]
        unit, job = block, None
        if isinstance(side.blocks, Rows):
            if block != 1:
                raise ValueError(f"blocks of {block} tokens: a body of rows takes one token as it comes")
            kept.append(side.blocks.body)
        elif side.blocks is not None:
            body, reader, scheme, bits, divisor = side.blocks
            over_tokens = reader.axis == "tokens"
            unit, job = reader.group if over_tokens else SPAN, Job(reader, scheme, bits, divisor is not None, 1, launch.asm)
            if slots % unit or slots < block:
                raise ValueError(f"a ring of {slots} slots does not hold a block of {block} tokens in whole runs of {unit}")
            check_format(side.ring[:, :, :block], reader, scheme, bits)
            warps = max(warps, 1 if over_tokens else pl.next_power_of_2(pl.cdiv(channels, QUANTIZE_TUNING.warp_channels)))
            given += [] if divisor is None else [divisor.astype(jnp.float32)]
            kept += [*body.words, body.scale, *([] if body.zero is None else [body.zero])]
        copies = isinstance(side.blocks, Rows)
        works.append(_Work(start, block // unit, unit, side.sink.shape[2], slots, job, copies, len(given), len(kept)))
        start, inputs, stored = start + works[-1].units, inputs + given, stored + kept
    aliased = [whole_array_but(2, array, (0, 1)) for array in stored]
    outputs = triton_call(
        functools.partial(_kernel, works=tuple(works), rows=len(rows)),
        name="append_token",
        grid=(batch, heads, start),
        in_specs=[
            *[pl.BlockSpec((1,), lambda b, k, s: (b,))] * len(places),
            *(whole_array_but(2, array, (0, 1)) for array in (*rows, *inputs)),
            *aliased,
        ],
        out_specs=aliased,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in stored],
        launch=launch,
        num_warps=warps,
        num_stages=1,
        aliases={len(places) + len(rows) + len(inputs) + i: i for i in range(len(stored))},
    )(*(array.astype(jnp.int32) for array in places), *rows, *inputs, *stored)
    return tuple(_with_arrays(side, own) for side, own in zip(sides, _by_side(outputs, [work.stored for work in works]), strict=True))


def _new_rows(sides: Sequence[Side]) -> list[Array]:
    """Return the new rows of all sides as one array [B, K, sides, H], which XLA makes in one launch; one by one where they differ in shape
    or dtype."""
    rows = [side.row for side in sides]
    return [jnp.concatenate(rows, axis=2)] if len({(row.shape, row.dtype) for row in rows}) == 1 else rows


def _by_side(arrays: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [arrays[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _with_arrays(side: Side, arrays: Sequence[Array]) -> Side:
    sink = [side.sink] if not side.sink.shape[2] else []
    sink, ring, *body = [*sink, *arrays]
    if side.blocks is None:
        return side._replace(sink=sink, ring=ring)
    if isinstance(side.blocks, Rows):
        return side._replace(sink=sink, ring=ring, blocks=Rows(body[0]))
    sets = len(side.blocks.body.words)
    packed = Packed(tuple(body[:sets]), body[sets], None if side.blocks.body.zero is None else body[sets + 1])
    return side._replace(sink=sink, ring=ring, blocks=side.blocks._replace(body=packed))


def _kernel(
    position_ref: Any, new_ref: Any, first_ref: Any, place_ref: Any, leaving_ref: Any, *refs: Any, works: tuple[_Work, ...], rows: int
) -> None:
    # refs: the new rows, [sides, H] or [1, H] of each side; of each side the divisor [1, H] if any; then sink [E, H] if any, ring [R, H],
    # the body's words [S / n, w], scale and zero of each side as they were; and these as they become
    held = sum(work.stored for work in works)
    of_sides = _by_side(refs[rows : -2 * held], [work.inputs for work in works]), _by_side(refs[-held:], [work.stored for work in works])
    program, position, new, leaving = pl.program_id(2), position_ref[0], new_ref[0] > 0, leaving_ref[0] > 0
    for side, (work, divisor, arrays) in enumerate(zip(works, *of_sides, strict=True)):
        row = refs[side if rows == len(works) else 0].at[pl.ds(0 if rows == len(works) else side, 1), :]
        sink = arrays[0] if work.sink else None
        ring, *body = arrays[1:] if work.sink else arrays
        writes = new & (program == work.start)
        if sink is not None:

            @pl.when(writes & (position < work.sink))
            def _(row=row, sink=sink) -> None:
                sink[pl.ds(position, 1), :] = row[...]

        @pl.when(writes)  # of a token in the sink too, as XLA does it: where no token of the ring is yet
        def _(row=row, ring=ring, work=work) -> None:
            ring[pl.ds((position - work.sink) % work.ring, 1), :] = row[...]

        if work.copies:

            @pl.when(leaving & (program == work.start))
            def _(row=row, body=body) -> None:
                body[0][pl.ds(place_ref[0], 1), :] = row[...].astype(body[0].dtype)

        if work.job is not None:
            own = program - work.start  # outside of the branch, where an interpreted kernel knows it

            @pl.when(leaving & (own >= 0) & (own < work.units))
            def _(work=work, job=work.job, ring=ring, body=body, divisor=divisor, own=own) -> None:
                at, slot = place_ref[0] + own * work.unit, (first_ref[0] + own * work.unit) % work.ring
                words, scale, zero = (body[:-1], body[-1], None) if job.reader.centre is not None else (body[:-2], *body[-2:])
                views, kernel = (_token_views, token_kernel) if job.reader.axis == "tokens" else (_channel_views, channel_kernel)
                rows, *others = views(job, ring, words, scale, zero, at, slot)
                kernel(rows, *divisor, *others, job=job)


class _Moved:
    """A ref that is indexed as kernel.py indexes the arrays of one group, in their place among all tokens."""

    def __init__(self, ref: Any, place: Callable[..., tuple[Any, ...]]):
        self._ref, self._place, self.dtype = ref, place, ref.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> Array:
        return self._ref[self._place(*index)]

    def __setitem__(self, index: tuple[Any, ...], value: Array) -> None:
        self._ref[self._place(*index)] = value


def _token_views(job: Job, ring: Any, words: Sequence[Any], scale: Any, zero: Any, at: Array, slot: Array) -> list[_Moved]:
    """Return the views of a group that runs over tokens at..at + group - 1: arrays [1, group, H], [1, group / slots, w] and [1, H]."""
    row, group = at // job.reader.layout.slots, at // job.reader.group
    return [
        _Moved(ring, lambda _, token, columns: (pl.ds(slot + token, 1), columns)),
        *(_Moved(ref, lambda _, i, columns: (pl.ds(row + i, 1), columns)) for ref in words),
        *(_Moved(ref, lambda _, columns: (pl.ds(group, 1), columns)) for ref in (scale, zero) if ref is not None),
    ]


def _channel_views(job: Job, ring: Any, words: Sequence[Any], scale: Any, zero: Any, at: Array, slot: Array) -> list[_Moved]:
    """Return the views of a span of tokens whose groups run over channels: arrays [SPAN, H], [SPAN / slots, w] and [H / group, SPAN]."""
    count = SPAN // job.reader.layout.slots
    row = at // job.reader.layout.slots
    return [
        _Moved(ring, lambda tokens, columns: (pl.ds(slot + tokens.start, tokens.size), columns)),
        *(_Moved(ref, lambda _, columns: (pl.ds(row, count), columns)) for ref in words),
        *(_Moved(ref, lambda group, tokens: (group, pl.ds(at + tokens.start, tokens.size))) for ref in (scale, zero) if ref is not None),
    ]
