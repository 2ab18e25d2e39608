"""Decode attention over a body on Mosaic GPU: the same pieces as decode_attention/kernel.py, by the
same schedule. block.py has the work of one block of threads."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.schedule import Pieces, Schedule, TileRun
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.mosaic.block import Block, store_merged
from pallas_kernels.mosaic.codebook import CodebookKeys, CodebookValues
from pallas_kernels.mosaic.copies import copy
from pallas_kernels.mosaic.dense import DenseKeys, DenseValues
from pallas_kernels.mosaic.eigen_keys import EigenKeys
from pallas_kernels.mosaic.grouped import GroupedKeys, GroupedValues
from pallas_kernels.mosaic.matrices import Matrices, on_warps
from pallas_kernels.mosaic.outlier_scores import outlier_scores
from pallas_kernels.mosaic.outlier_values import outlier_values
from pallas_kernels.mosaic.polar import PolarKeys
from pallas_kernels.mosaic.registers import OF_ALL_WARPS, SIDE, WARPS
from pallas_kernels.mosaic.rotary import RotatedKeys
from pallas_kernels.mosaic.route import span_of
from pallas_kernels.mosaic.runs import RunsKeys, RunsValues
from pallas_kernels.mosaic.spans_of_scores import WithOutliers
from pallas_kernels.mosaic.walk import Walk
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.dense import DenseReader
from pallas_kernels.readers.eigen_keys import EigenKeys as EigenKeysReader
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.runs import RunsKeys as RunsKeysReader
from pallas_kernels.readers.runs import RunsValues as RunsValuesReader
from pallas_kernels.readers.shared import LOG2E
from pallas_kernels.tiles.layout import SPAN

_SIDES: dict[type[Reader], tuple[Any, Any]] = {
    GroupedReader: (GroupedKeys, GroupedValues),
    CodebookReader: (CodebookKeys, CodebookValues),
    DenseReader: (DenseKeys, DenseValues),
    PolarReader: (PolarKeys, None),  # values have no angles
    RotatedReader: (RotatedKeys, None),  # values have no positions
    RunsKeysReader: (RunsKeys, None),
    EigenKeysReader: (EigenKeys, None),
    RunsValuesReader: (None, RunsValues),
}


def interpreted() -> Any:
    """Return how Pallas runs kernels without a GPU: with a detector of races."""
    return plgpu.InterpretGPUParams(detect_races=True)


class Operands(NamedTuple):
    """Arrays that blocks read besides limits and queries, or in a kernel the references to them.

    tables: constants of keys and of values.
    fixed: arrays by head that keys are read with, which a block copies to shared memory.
    arrays: the bodies of keys and of values, read tile by tile.
    """

    tables: tuple[Sequence[Any], Sequence[Any]]
    fixed: Sequence[Any]
    arrays: tuple[Sequence[Any], Sequence[Any]]


class Scratch(NamedTuple):
    """Shared memory of a block, or in a kernel the references to it: a ring of buffers for tiles of
    keys and of values, room for the fixed arrays, and barriers for copies by the copy engine."""

    keys: Sequence[Any]
    fixed: Sequence[Any]
    values: Sequence[Any]
    tiles_arrived: Any
    fixed_arrived: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A block that reads the runs of its schedule. `queries` is a reference [rows, heads, chunks,
    ...] with a row for each sequence if `shares_queries`, or for each of its `segments`."""

    block: Block
    operands: Operands
    scratch: Scratch
    outputs: Sequence[Any]
    queries: Any
    segments: int
    shares_queries: bool

    def attend(self, schedule: Schedule, limits: Any) -> None:
        """Read all runs of the block, and store a piece for each."""
        if self.operands.fixed and not self._differs_by_head:
            self._copy_fixed(0)
        Walk(schedule, limits).for_each_run(lax.axis_index("block"), self._read)

    @property
    def _differs_by_head(self) -> bool:
        return bool(self.operands.fixed) and self.operands.fixed[0].shape[0] > 1

    def _copy_fixed(self, head: Any) -> None:
        arrived = self.scratch.fixed_arrived
        for source, target in zip(self.operands.fixed, self.scratch.fixed, strict=True):
            copy(source.at[head], target, arrived)
        plgpu.wait_gmem_to_smem(0) if arrived is None else plgpu.barrier_wait(arrived)

    def _read(self, run: TileRun, place: Any) -> None:
        block, sequence = self.block, lax.div(run.row, jnp.int32(self.segments))
        sides: tuple[Any, Any] = block.keys, block.values
        row, head = sequence if self.shares_queries else run.row, run.head + block.first
        if self._differs_by_head:
            block.release()
            self._copy_fixed(run.head)
        chunks = [
            plgpu.load(self.queries.at[row, head, c], layout=OF_ALL_WARPS, optimized=False)
            for c in range(block.keys.chunks[0])
        ]
        k_table, v_table = (
            side.table(refs, block.ops)
            for side, refs in zip(sides, self.operands.tables, strict=True)
        )
        query = sides[0].opened([on_warps(chunk) for chunk in chunks], k_table, block.ops)
        carry = block.attend(run._replace(row=sequence), query, v_table)
        (m_ref, l_ref, o_ref), piece = self.outputs, pl.ds(place, 1)
        store_merged((m_ref.at[piece], l_ref.at[piece], o_ref.at[place]), carry, block.ops)


def attention_in_pieces(
    q: Float[Array, "B K G H"],
    keys: tuple[Reader, Sequence[Array]],
    values: tuple[Reader, Sequence[Array]],
    limits: Int[Array, " B"],
    *,
    capacity: int,
    lower: LowerLimits | None,
    soft_cap: float | None,
    heads: range,
    tuning: Tuning,
    bulk: bool,
    interpret: Any = None,
) -> list[Pieces]:
    """Return the pieces of attention to the first limits[b] tokens (decode_attention/kernel.py),
    and those of the outliers of values, if there are any.

    Args:
        q, keys, values, limits, capacity, lower, soft_cap: as `decode_attention` takes them.
            `route.unsupported` says which of them this kernel does not serve.
        heads: the KV heads that are attended to.
        tuning: of `route.tuning_for`.
        bulk: copy tiles with the copy engine, which came with compute capability 9.0.
        interpret: Mosaic GPU's interpreter parameters, or None to compile.
    """
    batch, _, group, channels = q.shape
    columns, real = (8 if group <= 8 else 16), pl.next_power_of_2(group)
    span = span_of(keys[0], values[0])
    k, v = _sides(keys[0], values[0], span, tuning.tile)
    limits, segments = limits.astype(jnp.int32), 1
    if lower is not None:
        limits, segments = lower.places(limits), lower.segments
        q = lower.queries(q)
    padded = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    if keys[0].adds_scores:
        scaled = padded[:, heads.start : heads.stop] * (LOG2E * channels**-0.5)
        added = outlier_scores(scaled, *keys, limits, real, heads.start, interpret)
        k = WithOutliers(k, added, heads.start)
    planes = k.query(padded, keys[1])
    schedule = Schedule(
        tuning.programs(batch * len(heads), capacity),
        tuning.tile,
        batch * segments,
        len(heads),
        segments,
        lower is not None,
    )
    # tiles of eight rows begin at a multiple of eight tokens, and the last one at the arrays' end
    ops = Matrices(bool(interpret), bulk and not interpret and capacity % SIDE == 0)
    operands = Operands(
        (k.constants(keys[1]), v.constants(values[1])),
        k.fixed(keys[1]) if keys[0].turns else [],
        (k.views(keys[1]), v.views(values[1])),
    )
    scratch = _scratch((k, v), operands, tuning, ops, bulk)
    inputs, operands_of = jax.tree.flatten(operands)

    def decode_attention(limits_ref: Any, q_ref: Any, *refs: Any) -> None:
        of_operands: Operands = operands_of.unflatten(refs[: len(inputs)])
        outputs, room = refs[len(inputs) : -len(scratch)], Scratch(*refs[-len(scratch) :])
        block = Block(
            keys=k,
            values=v,
            tuning=tuning,
            columns=columns,
            span=span,
            exponent=values[0].weight_exponent,
            capacity=capacity,
            soft_cap=soft_cap,
            ops=ops,
            arrays=of_operands.arrays,
            buffers=([*room.keys, *room.fixed], room.values),
            barriers=room.tiles_arrived,
            first=heads.start,
            kept=outputs[3] if values[0].adds_values else None,
        )
        program = Program(
            block, of_operands, room, outputs[:3], q_ref, segments, q_ref.shape[0] == batch
        )
        program.attend(schedule, limits_ref)

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = tuple(f32((schedule.pieces, *rest)) for rest in ((real,), (real,), (channels, real)))
    if values[0].adds_values:
        spans = pl.cdiv(capacity, tuning.tile) * (tuning.tile // SPAN)
        shapes = *shapes, f32((batch, len(heads), spans, real, SPAN))
    call = plgpu.kernel(
        decode_attention,
        out_type=shapes,
        grid=(schedule.programs,),
        grid_names=("block",),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=4 * WARPS * 32 * columns,
        ),
        interpret=interpret,
    )
    with jax.enable_x64(False):
        m, l, o, *kept = call(limits, planes, *inputs)
    pieces = [Pieces(m, l, o, limits, schedule)]
    if kept:
        scored = kept[0], values[1], pieces[0], capacity
        pieces.append(outlier_values(*scored, channels, heads.start, interpret))
    return pieces


def _sides(keys: Reader, values: Reader, span: int, tile: int) -> tuple[Any, Any]:
    """Return how keys and values are read on Mosaic GPU."""
    k = _SIDES[type(keys)][0].of(keys, span)
    k = dataclasses.replace(k, tile=tile) if isinstance(k, RunsKeys) else k
    return k, _SIDES[type(values)][1].of(values, span)


def _scratch(
    sides: tuple[Any, Any], operands: Operands, tuning: Tuning, ops: Matrices, bulk: bool
) -> Scratch:
    """Return the shared memory of a block."""
    counts = tuple(map(len, operands.arrays))
    keys, values = (
        side.buffers(arrays, tuning.stages, tuning.tile, ops)
        for side, arrays in zip(sides, operands.arrays, strict=True)
    )
    fixed = [plgpu.SMEM(array.shape[1:], array.dtype) for array in operands.fixed]
    return Scratch(
        keys,
        fixed,
        values,
        plgpu.Barrier(num_arrivals=sum(counts), num_barriers=tuning.stages) if bulk else None,
        plgpu.Barrier(num_arrivals=len(fixed)) if bulk and fixed else None,
    )
