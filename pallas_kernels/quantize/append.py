"""Append a token to a layer's windows, attend to them with its query, and quantize the block that
leaves them into the body, in one launch.

A `BlockWriter` (writer.py) quantizes a block: there is one for uniform groups (blocks.py), and one
for each of the other formats. All arrays are updated in place. Memory that is not written keeps its
contents, and if no block leaves, one row of each window is all that is written. Attention
(decode_attention/windows.py) covers the windows with the new token in them. It reads that token
from its source, because programs do not wait for each other.
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
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.decode_attention.windows import WindowQueries, attend
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.mosaic import route as mosaic
from pallas_kernels.quantize.blocks import RefView, Source, WindowOfHead
from pallas_kernels.quantize.writer import BlockWriter
from pallas_kernels.triton_call import triton_call, whole_array_but


class Side(NamedTuple):
    """Keys or values: the windows, the new row, and the body. Without `blocks` only the windows are
    written.
    """

    row: Float[Array, "B K 1 H"]
    sink: Float[Array, "B K E H"]
    ring: Float[Array, "B K R H"]
    blocks: Blocks | Rows | None


class Blocks(NamedTuple):
    """The arrays of a body, the writer that quantizes blocks into them, and the writer's other
    inputs.

    All are [B, K, ...]. An axis is 1 long if all rows of the batch, or all heads, share an entry.
    """

    body: Sequence[Array]
    writer: BlockWriter
    inputs: Sequence[Array] = ()


class Rows(NamedTuple):
    """A body of rows in full precision, whose blocks are one token: the new token leaves its window
    at once.
    """

    body: Float[Array, "B K S H"]


class Places(NamedTuple):
    """The state of the rows of the batch.

    Args:
        position: of the new token.
        new: True if there is a new token.
        first: the first token of the block that leaves, counted after the sink.
        place: of that token in the body, which may be a shard of every D-th block.
        leaving: True if a block leaves.
    """

    position: Int[Array, " B"]
    new: Bool[Array, " B"]
    first: Int[Array, " B"]
    place: Int[Array, " B"]
    leaving: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Work:
    """The programs and arrays of one side.

    Args:
        start: its first program.
        programs: its number of programs, of which `writer.programs` quantize a unit.
        sink: slots of the sink.
        ring: slots of the ring.
        writer: quantizes blocks, if there are any.
        copies: the body takes the row as it is.
        new: a block holds the new token.
        inputs: how many arrays it reads.
        stored: how many arrays it updates.
    """

    start: int
    programs: int
    sink: int
    ring: int
    writer: BlockWriter | None
    copies: bool
    new: bool
    inputs: int
    stored: int


@dataclasses.dataclass(frozen=True)
class _Asking:
    """The program that attends to the windows, and how many arrays it reads for its queries (the
    shared ones and the queries). 0 means no attention. The rest is what `windows.attend` takes.
    """

    program: int
    inputs: int
    asm: bool
    window: int | None = None
    soft_cap: float | None = None


def append_token(
    sides: Sequence[Side],
    places: Places,
    *,
    block: int,
    queries: WindowQueries | None = None,
    launch: Launch = LAUNCH,
) -> tuple[tuple[Side, ...], Splits | None]:
    """Append each row's new token. Returns the sides, and the attention of `queries` to the windows
    if there are any.

    Each new token is in its window afterwards, and tokens first .. first + block - 1 are in the
    body if they leave. Equations and exactness are in the writers.

    Slot s of a ring of R slots, after E sink tokens, holds a token p with (p - E) mod R = s. R is a
    multiple of a writer's run, so that a block wraps only between two runs. The block that leaves
    does not hold the new token, unless R is the block. A body of rows takes the new row at `place`
    if it leaves.

    Args:
        sides: keys and values, in this order if there are queries.
        places: the state of the rows. `first` and `place` are multiples of the block.
        block: tokens of a block.
        queries: attend to the windows.
        launch: how the kernel is launched.

    Raises ValueError if a writer cannot serve the format, a block does not fit the ring, or kernels
    cannot read the windows.
    """
    batch, heads, _, _ = sides[0].row.shape
    rows, start = _new_rows(sides), 0
    works, inputs, stored = list[Work](), list[Array](), list[Array]()
    for side in sides:
        work, read_arrays, updated_arrays = _work_of(side, start, block)
        works.append(work)
        inputs += read_arrays
        stored += updated_arrays
        start += work.programs
    if queries is not None:
        queries.check(sides[0].ring)
    if launch.route == "mosaic" and not mosaic.unappended(
        [work.writer for work in works], [side.ring for side in sides], queries
    ):
        return _by_mosaic(sides, works, places, rows, inputs, stored, queries, launch)
    warps = max([1, *(work.writer.warps for work in works if work.writer)])
    asking, parts = _Asking(start, 0, launch.asm), list[jax.ShapeDtypeStruct]()
    row_numbers, shared, of_heads = list(places), list[Array](), list[Array]()
    if queries is not None:
        q, shared = queries.arrays(sides[0].ring.dtype)
        options = asking.asm, queries.window, queries.soft_cap
        asking, parts = _Asking(start, len(shared) + 1, *options), queries.parts
        row_numbers, of_heads = [*places, queries.tokens, queries.limits], [q]
        warps = max(warps, queries.warps)
    aliased = [whole_array_but(1, array, (0,)) for array in stored]
    row_numbers = [array.astype(jnp.int32) for array in row_numbers]
    before = [*row_numbers, *shared, *of_heads, *rows, *inputs]
    outputs = triton_call(
        functools.partial(_kernel, works=tuple(works), rows=len(rows), asking=asking),
        name="append_token",
        grid=(batch, heads, start + (queries is not None)),
        in_specs=[
            *[pl.BlockSpec((1,), lambda b, k, s: (b,))] * len(row_numbers),
            *(whole_array_but(0, array, ()) for array in shared),
            *(whole_array_but(2, array, (0, 1)) for array in of_heads),
            *(whole_array_but(1, array, (0,)) for array in (*rows, *inputs)),
            *aliased,
        ],
        out_specs=[*aliased, *(whole_array_but(3, part, (0, 1, 2)) for part in parts)],
        out_shape=[*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in stored), *parts],
        launch=launch,
        num_warps=warps,
        num_stages=1,
        aliases={len(before) + i: i for i in range(len(stored))},
    )(*before, *stored)
    by_side = _by_side(outputs[: len(stored)], [work.stored for work in works])
    after = tuple(_with_arrays(side, arrays) for side, arrays in zip(sides, by_side, strict=True))
    return after, Splits(*outputs[len(stored) :]) if parts else None


def _by_mosaic(
    sides: Sequence[Side],
    works: Sequence[Work],
    places: Places,
    rows: Sequence[Array],
    inputs: Sequence[Array],
    stored: Sequence[Array],
    queries: WindowQueries | None,
    launch: Launch,
) -> tuple[tuple[Side, ...], Splits | None]:
    """Return what `append_token` returns, by the kernel on Mosaic GPU."""
    numbers = [*places, *([] if queries is None else [queries.tokens, queries.limits])]
    by_side, parts = mosaic.appended(
        works,
        [array.astype(jnp.int32) for array in numbers],
        rows,
        _by_side(inputs, [work.inputs for work in works]),
        _by_side(stored, [work.stored for work in works]),
        queries,
        launch,
    )
    after = tuple(_with_arrays(side, arrays) for side, arrays in zip(sides, by_side, strict=True))
    return after, Splits(*parts) if parts else None


def _work_of(side: Side, start: int, block: int) -> tuple[Work, Sequence[Array], list[Array]]:
    """Return the work of a side whose programs begin at `start`, the arrays that it reads besides
    rows, and the arrays that it updates.
    """
    slots, programs = side.ring.shape[2], 1
    inputs, stored = list[Array](), [side.sink, side.ring] if side.sink.shape[2] else [side.ring]
    writer, copies = None, isinstance(side.blocks, Rows)
    if isinstance(side.blocks, Rows):
        if block != 1:
            raise ValueError(
                f"blocks of {block} tokens: a body of rows takes one token as it comes"
            )
        stored.append(side.blocks.body)
    elif side.blocks is not None:
        body, writer, inputs = side.blocks
        if slots % writer.run or slots < block:
            raise ValueError(
                f"a ring of {slots} slots does not hold a block of {block} tokens in whole runs of"
                f" {writer.run}"
            )
        writer.check(side.ring, block)
        programs, stored = block // writer.unit * writer.programs, [*stored, *body]
    work = Work(
        start=start,
        programs=programs,
        sink=side.sink.shape[2],
        ring=slots,
        writer=writer,
        copies=copies,
        new=slots == block,
        inputs=len(inputs),
        stored=len(stored),
    )
    return work, inputs, stored


def _new_rows(sides: Sequence[Side]) -> list[Array]:
    """Return the new rows of all sides as one array [B, K, sides, H], which XLA makes in one
    launch, or one by one if their shapes or dtypes differ.
    """
    rows = [side.row for side in sides]
    alike = len({(row.shape, row.dtype) for row in rows}) == 1
    return [jnp.concatenate(rows, axis=2)] if alike else rows


def _by_side(arrays: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [arrays[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _with_arrays(side: Side, arrays: Sequence[Array]) -> Side:
    sink, ring, *body = [*([] if side.sink.shape[2] else [side.sink]), *arrays]
    blocks = side.blocks
    if isinstance(blocks, Rows):
        blocks = Rows(body[0])
    elif blocks is not None:
        blocks = blocks._replace(body=body)
    return side._replace(sink=sink, ring=ring, blocks=blocks)


def _kernel(
    position_ref: Any,
    new_ref: Any,
    first_ref: Any,
    place_ref: Any,
    leaving_ref: Any,
    *refs: Any,
    works: tuple[Work, ...],
    rows: int,
    asking: _Asking,
) -> None:
    # refs: with queries, the row's tokens and limit, the shared arrays, and q [columns, H]. The new
    # rows [K, sides, H], or [K, 1, H] of each side. The inputs of each side. Then, of each side,
    # sink [K, E, H] if any, ring [K, R, H] and the body's arrays before the step, and the same
    # after it. With queries, m [R], l [R] and o [H, R].
    asked, parts = list[Any](), list[Any]()
    if asking.inputs:
        asked, parts = list(refs[: asking.inputs + 2]), list(refs[-3:])
        refs = refs[asking.inputs + 2 : -3]
    stored = sum(work.stored for work in works)
    of_sides = (
        _by_side(refs[rows : -2 * stored], [work.inputs for work in works]),
        _by_side(refs[-stored:], [work.stored for work in works]),
    )
    head, program = pl.program_id(1), pl.program_id(2)
    position, new, leaving = position_ref[0], new_ref[0] > 0, leaving_ref[0] > 0
    windows = list[tuple[Source | None, Source]]()
    # Also for a token in the sink, as XLA does: no token of the ring is there yet.
    for side, (work, inputs, arrays) in enumerate(zip(works, *of_sides, strict=True)):
        of_side = pl.ds(0 if rows == len(works) else side, 1)
        row = RefView(
            refs[side if rows == len(works) else 0],
            lambda head, columns, of_side=of_side: (head, of_side, columns),
        )
        sink, ring, *body = arrays if work.sink else (None, *arrays)
        writes, new_slot = new & (program == work.start), (position - work.sink) % work.ring
        of_sink = (
            None
            if sink is None
            else Source(sink, 0, (jnp.where(new & (position < work.sink), position, -1), row))
        )
        windows.append((of_sink, Source(ring, 0, (jnp.where(new, new_slot, -1), row))))
        if sink is not None:

            @pl.when(writes & (position < work.sink))
            def _(row=row, sink=sink) -> None:
                sink[head, pl.ds(position, 1), :] = row[head, :]

        @pl.when(writes)
        def _(row=row, ring=ring, new_slot=new_slot) -> None:
            ring[head, pl.ds(new_slot, 1), :] = row[head, :]

        if work.copies:

            @pl.when(leaving & (program == work.start))
            def _(row=row, body=body) -> None:
                body[0][head, pl.ds(place_ref[0], 1), :] = row[head, :].astype(body[0].dtype)

        if work.writer is not None:
            # Outside of the branch, so that an interpreted kernel knows it.
            of_work = program - work.start

            @pl.when(leaving & (of_work >= 0) & (of_work < work.programs))
            def _(
                work=work,
                writer=work.writer,
                row=row,
                ring=ring,
                body=body,
                inputs=inputs,
                of_work=of_work,
                new_slot=new_slot,
            ) -> None:
                before = lax.div(of_work, writer.programs) * writer.unit
                source = Source(
                    ring, (first_ref[0] + before) % work.ring, (new_slot, row) if work.new else None
                )
                writer.write(
                    lax.rem(of_work, writer.programs),
                    head,
                    source,
                    place_ref[0] + before,
                    inputs,
                    body,
                )

    if asked:

        @pl.when(program == asking.program)
        def _() -> None:
            tokens_ref, limit_ref, *shared, q = asked
            sinks = [WindowOfHead(sink, head) for sink, _ in windows if sink is not None]
            rings = [WindowOfHead(ring, head) for _, ring in windows]
            counts = tokens_ref[0], limit_ref[0]
            options = asking.window, asking.soft_cap, asking.asm
            attend(q, shared, sinks, rings, *counts, parts, *options)
