"""Append a token to a layer's windows, attend to them with its query, and quantize the block that
leaves them, on Mosaic GPU: what quantize/append.py does, in one launch too.

Programs are those of quantize/append.py. Arrays that are updated are references, which the launch
takes over.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.decode_attention.windows import WindowQueries
from pallas_kernels.mosaic.block import store_merged
from pallas_kernels.mosaic.blocks import Unit
from pallas_kernels.mosaic.matrices import Matrices
from pallas_kernels.mosaic.registers import SIDE, WARPS
from pallas_kernels.mosaic.ring import RingRows
from pallas_kernels.mosaic.rows import Rows
from pallas_kernels.mosaic.windows import CHUNK, Attending, Window
from pallas_kernels.quantize.append import Work
from pallas_kernels.quantize.writer import BlockWriter


@dataclasses.dataclass(frozen=True)
class NewRows:
    """The new rows of one side, in an array [B, K, sides, H] of several."""

    ref: Any
    side: int

    def at(self, unit: tuple[Any, Any]) -> Any:
        """Return the new row [1, H] of a row of the batch and a head."""
        return self.ref.at[(*unit, pl.ds(self.side, 1))]


@dataclasses.dataclass(frozen=True)
class Step:
    """A row's numbers (quantize.append.Places) and a head, in a kernel."""

    position: Any
    new: Any
    first: Any
    place: Any
    leaving: Any
    unit: tuple[Any, Any]
    program: Any
    interpret: bool

    def slot(self, side: Work) -> Any:
        """Return the slot of the new token in the ring."""
        turns = -(-side.sink // side.ring) * side.ring  # keep the dividend from being negative
        return lax.rem(self.position - side.sink + turns, jnp.int32(side.ring))

    def write_windows(self, side: Work, new: NewRows, sink: Any, ring: Any) -> None:
        """Write the new row of this program's head."""
        row, mine = new.at(self.unit), self.new & (self.program == side.start)
        if sink is not None:

            @pl.when(mine & (self.position < side.sink))
            def _() -> None:
                self._copy(row, sink.at[(*self.unit, pl.ds(self.position, 1))])

        @pl.when(mine)
        def _() -> None:
            self._copy(row, ring.at[(*self.unit, pl.ds(self.slot(side), 1))])

    def _copy(self, row: Any, target: Any) -> None:
        """Copy one row [1, H]."""
        rows = Rows(self.interpret, 0)
        rows.store(target, rows.load(row, SIDE).astype(target.dtype), 1)

    def write_block(
        self, side: Work, row: NewRows, ring: Any, inputs: Sequence[Any], body: Sequence[Any]
    ) -> None:
        if side.writer is None and not side.copies:
            return
        of_side = self.program - side.start

        @pl.when(self.leaving & (of_side >= 0) & (of_side < side.programs))
        def _() -> None:
            if side.writer is None:
                self._copy(row.at(self.unit), body[0].at[(*self.unit, pl.ds(self.place, 1))])
            else:
                self._unit_of(side, side.writer, of_side, row, ring, inputs, body).write(
                    side.writer
                )

    def _unit_of(
        self,
        side: Work,
        writer: BlockWriter,
        of_side: Any,
        row: NewRows,
        ring: Any,
        inputs: Sequence[Any],
        body: Sequence[Any],
    ) -> Unit:
        """Return the unit of the `of_side`-th program of a side."""
        tokens, programs = writer.unit, jnp.int32(writer.programs)
        before = lax.div(of_side, programs) * tokens
        slot = lax.rem(self.first + before, jnp.int32(side.ring))

        def rows_of(head: Any) -> RingRows:
            at = self.unit[0], head
            return RingRows(ring.at[at], slot, self.slot(side) if side.new else None, row.at(at))

        return Unit(
            rows_of,
            self.unit,
            ring.shape[1],
            lax.rem(of_side, programs),
            self.place + before,
            inputs,
            body,
            self.interpret,
        )

    def window(self, side: Work, of_sink: bool, refs: Sequence[Any], rows: Any, counts: Any) -> Any:
        """Return a window of both sides. counts: the tokens of the row, and how many are in the
        body."""
        (tokens, limit), slots = counts, side.sink if of_sink else side.ring
        sides = [ref.at[self.unit] for ref in refs]
        if of_sink:
            inside = self.new & (self.position < slots)
            new_slot = jnp.where(inside, self.position, -1)
            return Window(sides, rows, new_slot, lambda slot: (slot, slot < tokens))
        newest = tokens - 1
        turns = (-(-side.sink // slots) + 1) * slots
        at = lax.rem(newest - side.sink + turns, jnp.int32(slots))

        def of_ring(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
            back = at - slot
            position = newest - jnp.where(back < 0, back + slots, back)
            return position, position >= side.sink + limit

        return Window(sides, rows, jnp.where(self.new, self.slot(side), -1), of_ring)


def append(
    works: Sequence[Work],
    numbers: Sequence[Array],
    rows: Sequence[Array],
    inputs: Sequence[Sequence[Array]],
    stored: Sequence[Sequence[Array]],
    queries: WindowQueries | None,
    interpret: Any = None,
) -> tuple[list[list[Array]], list[Array]]:
    """Return the stored arrays after the step, and the parts of attention to the windows.

    Args:
        works: the programs and arrays of each side.
        numbers: those of `Places`, and with queries the tokens and limits of rows, int32 [B].
        rows: the new rows of all sides [B, K, sides, H], or of each side, [B, K, 1, H].
        inputs: of each side, what its blocks are quantized with.
        stored: of each side, the sink if it has slots, the ring, and the arrays of the body.
    """
    batch, heads = rows[0].shape[:2]
    q, shared = [], []
    if queries is not None:
        padded, arrays = queries.arrays(stored[0][0].dtype)
        q, units = [padded], arrays[:-1]
        shared = [*(array[None] for array in units), *arrays[len(units) :]]
    columns, channels = q[0].shape[2:] if q else (SIDE, SIDE)
    flat = [array for arrays in stored for array in arrays]
    programs = sum(work.programs for work in works)

    def append_token(*refs: Any) -> None:
        left = list(refs)

        def take(arrays: Sequence[Any]) -> list[Any]:
            taken, left[:] = left[: len(arrays)], left[len(arrays) :]
            return taken

        unit = lax.axis_index("row"), lax.axis_index("head")
        of_row = [ref[unit[0]] for ref in take(numbers)]
        program = lax.axis_index("program")
        position, new, first, place, leaving = of_row[:5]
        options = first, place, leaving > 0, unit, program, bool(interpret)
        step = Step(position, new > 0, *options)
        row_refs = take(rows)
        if len(rows) == len(works):
            of_rows = [NewRows(ref, 0) for ref in row_refs]
        else:
            of_rows = [NewRows(row_refs[0], side) for side in range(len(works))]
        of_inputs = [take(arrays) for arrays in inputs]
        q_refs, shared_refs = take(q), take(shared)
        of_stored = [take(arrays) for arrays in stored]
        for side, row, more, arrays in zip(works, of_rows, of_inputs, of_stored, strict=True):
            sink, ring, *body = arrays if side.sink else (None, *arrays)
            step.write_block(side, row, ring, more, body)
            step.write_windows(side, row, sink, ring)
        if queries is None:
            return
        reach, soft_cap = queries.window, queries.soft_cap

        @pl.when(program == programs)
        def _() -> None:
            ops = Matrices(bool(interpret))
            tokens = of_row[5]
            seen = None if reach is None else tokens - reach
            attending = Attending.opened(q_refs[0].at[unit], shared_refs, seen, soft_cap, ops)
            carry = attending.start()
            for i in range(2 if works[0].sink else 1):
                of_window = [arrays[i] for arrays in of_stored]
                of_sink = bool(works[0].sink) and i == 0
                new_rows = [row.at(unit) for row in of_rows]
                window = step.window(works[0], of_sink, of_window, new_rows, of_row[5:7])
                carry = attending.add(window, carry)
            m_ref, l_ref, o_ref = (ref.at[unit] for ref in left)
            store_merged((m_ref, l_ref, o_ref.at[0]), attending.parts(carry), ops)

    call = plgpu.kernel(
        append_token,
        out_type=tuple(queries.parts) if queries is not None else (),
        grid=(batch, heads, programs + len(q)),
        grid_names=("row", "head", "program"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=4 * WARPS * CHUNK * columns,
        ),
        interpret=interpret,
    )
    with jax.enable_x64(False):
        taken = [jax.new_ref(array) for array in flat]
        of_sides = [array for of_side in inputs for array in of_side]
        parts = call(*numbers, *rows, *of_sides, *q, *shared, *taken)
        after = [jax.freeze(ref) for ref in taken]
    ends = [sum(len(arrays) for arrays in stored[: i + 1]) for i in range(len(stored))]
    by_side = [after[end - len(a) : end] for end, a in zip(ends, stored, strict=True)]
    return by_side, list(parts)
