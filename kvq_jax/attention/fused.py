"""Call the fused kernels for GPUs with the arrays of caches. `dispatch` imports this module only
when it launches a kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.grouped_array import GroupedArray
from kvq_jax.arrays.stored import load_body
from kvq_jax.attention import online_softmax, streaming
from kvq_jax.attention.body_view import BodyView, rotated_back
from kvq_jax.attention.logits import first_inside
from kvq_jax.codecs.codec import Codec, required_rope
from kvq_jax.codecs.kernel_writers import KernelWriter
from kvq_jax.codecs.kernels import KernelJob
from kvq_jax.codecs.learning import for_kernels
from kvq_jax.layer.kept_codes import unwritten
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, QueryBNTH, RowsBKTH, Tree
from kvq_jax.types.rope import Rope
from pallas_kernels.decode_attention.kernel import (
    attention_in_pieces,
    decode_attention,
    heads_at_once,
)
from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.merge import merged, merged_output
from pallas_kernels.decode_attention.partial_attention import PartialAttention, Splits
from pallas_kernels.decode_attention.windows import DTYPES, WindowQueries
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route as mosaic
from pallas_kernels.quantize import append as quantize_append
from pallas_kernels.quantize.append import Blocks, Places, Rows, Side
from pallas_kernels.quantize.blocks import GroupedBlocks, RowBlocks
from pallas_kernels.quantize.kernel import quantize_rows
from pallas_kernels.quantize.rounding import Job
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import has_triton


class BodyArguments(NamedTuple):
    """The arguments of `decode_attention` for one layer's body: queries, keys, values and limits,
    and what the layer's attention asks for."""

    arrays: tuple[
        Float[Array, "B K R H"],
        tuple[Reader, Sequence[Array]],
        tuple[Reader, Sequence[Array]],
        Int[Array, " B"],
    ]
    options: dict[str, Any]


def attend(
    plan: LayerPlan,
    params: Tree,
    after: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    windows: Splits | None,
    launch: Launch,
) -> QueryBNTH:
    """Attend as `streaming.attend` does, with one query token, and NaN for those that
    `streaming.without_lost` names. The output at padding is finite, and not always 0: the kernel
    that merges all parts computes it too.

    after: the state with the new token.
    windows: the attention over its windows from `append_token`, or None if they hold no token that
        the body lacks, or no kernel reads them.
    """
    if windows is None and not _leave_at_once(plan):
        add_body = functools.partial(_add_body, launch)
        out = streaming.attend(plan, params, after, body, inputs, limits, add_body, appended=True)
        return streaming.without_lost(plan, inputs, out, after.floor)
    group = inputs.q_rot.shape[1] // plan.heads
    rows = _by_kv_head(plan, inputs.q_rot)
    of_windows = [] if windows is None else [windows]
    view = BodyView(plan, params, after.stats, body, inputs.rope)
    arguments = _body_arguments(view, rows, inputs.positions, limits)
    if _one_kernel_merges(plan, arguments, inputs):
        of_body = attention_in_pieces(*arguments.arrays, **arguments.options, launch=launch)
        positions, capacity, dtype = inputs.positions, plan.regions.capacity, inputs.q_rot.dtype
        if after.floor is not None:
            lost = streaming.below_floor(plan, positions, after.floor) & inputs.valid
            positions = jnp.where(lost, capacity, positions)
        return merged_output(
            [*of_windows, *of_body],
            group,
            positions[:, 0],
            capacity=capacity,
            dtype=dtype,
            launch=launch,
        ).reshape(inputs.q_rot.shape)
    part = _body_part(launch, view, arguments)
    if plan.regions.axis is not None:
        part = online_softmax.across(part, plan.regions.axis)
    if of_windows:
        part = online_softmax.merge(merged(of_windows, group, launch=launch), part)
    out = streaming.output_of(plan, part, inputs.q_rot, inputs.sinks)
    return streaming.without_lost(plan, inputs, out, after.floor)


def _one_kernel_merges(plan: LayerPlan, arguments: BodyArguments, inputs: LayerInputs) -> bool:
    """Return True if one kernel merges all parts and writes the output."""
    query, (keys, _), (values, _), _ = arguments.arrays
    return (
        plan.regions.axis is None
        and plan.v.kernels.sum is None
        and inputs.sinks is None
        and not plan.lse
        and not values.sums_codes
        and heads_at_once(query, keys, values, plan.regions.held_capacity) == plan.heads
    )


def leaves_at_once(plan: LayerPlan, codec: Codec) -> bool:
    """Return True if a new token enters the body in its own step and is stored there unchanged, so
    that the windows hold no token that the body lacks."""
    regions = plan.regions
    without_windows = (
        regions.sink == regions.recent == 0
        and regions.block == 1
        and regions.shards == 1
        and regions.body_capacity > 0
    )
    return (
        without_windows and codec.facts.stores_rows and not plan.joint and plan.cross_layer is None
    )


def _leave_at_once(plan: LayerPlan) -> bool:
    return all(leaves_at_once(plan, codec) for codec in plan.codecs)


def _by_kv_head(plan: LayerPlan, q: QueryBNTH) -> Float[Array, "B K R H"]:
    """Return the queries of one token by the KV head that they share."""
    batch, heads, _, head_dim = q.shape
    return q.reshape(batch, plan.heads, heads // plan.heads, head_dim)


def _queries(
    plan: LayerPlan, state: LayerState, inputs: LayerInputs, limits: PositionsBT
) -> WindowQueries | None:
    """Return the queries that attend to the windows in a kernel.

    None if the windows hold no token that the body lacks, or rows that no kernel reads. Kernels
    read keys before or after RoPE, and values, in 16 bits. Raise ValueError if keys cached before
    RoPE come without `rope`.
    """
    vectors = plan.k.facts.form != "other" and plan.v.facts.form == "vectors"
    if _leave_at_once(plan) or not vectors or plan.joint or state.ring[0].dtype.name not in DTYPES:
        return None
    rotation, positions, q = None, inputs.positions[:, 0], inputs.q_rot
    if plan.k.facts.form == "before_rope":
        q, rope = _one_factor(q, required_rope(inputs.rope))
        rotation = rope.inverse_frequencies, rope.attention_factor
    tokens = positions + inputs.valid[:, 0].astype(positions.dtype)
    attention, rows = plan.attention, _scaled(plan, _by_kv_head(plan, q))
    special = attention.window, attention.soft_cap
    return WindowQueries(rows, tokens, limits[:, 0], rotation, *special)


def _scaled(plan: LayerPlan, rows: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
    """Return queries whose products with keys kernels scale by H ** -0.5 to the layer's scores."""
    scale, usual = plan.attention.scale, plan.head_dim**0.5
    return rows if scale is None else rows.astype(jnp.float32) * (scale * usual)


def _one_factor(q: Float[Array, "... H"], rope: Rope) -> tuple[Float[Array, "... H"], Rope]:
    """Return queries and a rotation of keys with one attention factor, as kernels take it. A factor
    for each pair (partial rotation) is moved to the queries: q . a R k = (a q) . R k."""
    if not rope.attention_factor.ndim:
        return q, rope
    return rope.scaled(q), dataclasses.replace(rope, attention_factor=jnp.ones((), jnp.float32))


def _add_body(
    launch: Launch,
    view: streaming.View,
    queries: streaming.Queries,
    rows: Float[Array, "B K R H"],
    part: PartialAttention,
) -> PartialAttention:
    """Return `part` with the body added, as `streaming.read_chunks` does, by the decode-attention
    kernel."""
    body = BodyView(view.plan, view.params, view.stats, view.body, view.rope)
    arguments = _body_arguments(body, rows, queries.positions, queries.limits)
    return online_softmax.merge(part, _body_part(launch, body, arguments))


def _body_part(launch: Launch, view: BodyView, arguments: BodyArguments) -> PartialAttention:
    part = decode_attention(*arguments.arrays, **arguments.options, launch=launch)
    return part._replace(o=view.plan.v.kernels.summed(view.stats[-1], part.o))


def _body_arguments(
    view: BodyView, rows: Float[Array, "B K R H"], positions: PositionsBT, limits: PositionsBT
) -> BodyArguments:
    """Return the arguments of the kernels that read a layer's body."""
    plan, rope, regions = view.plan, view.rope, view.plan.regions
    rows = _scaled(plan, rows)
    if plan.k.facts.form == "before_rope":
        rows, rope = _one_factor(rows, required_rope(rope))
    keys, values = (
        reader_and_arrays(codec, side_params, arrays, rope, regions)
        for codec, side_params, arrays in zip(plan.codecs, view.params, view.body, strict=True)
    )
    query = plan.k.query(view.params[0], view.stats[0], rows)
    first, lower = first_inside(plan.attention, regions.sink, positions), None
    if first is not None:
        lower = LowerLimits(regions.held_before(first[:, 0]))
    if lower is not None and regions.wraps:
        tokens = regions.read_capacity
        lower = lower._replace(ring=tokens)
        if keys[0].turns:
            begun = limits[:, 0] // tokens * tokens
            query, before = rotated_back(query, begun, tokens, required_rope(rope))
            lower = lower._replace(q_before=before)
    options = {
        "capacity": regions.held_capacity,
        "lower": lower,
        "soft_cap": plan.attention.soft_cap,
    }
    return BodyArguments((query, keys, values, regions.held(limits[:, 0])), options)


def reader_and_arrays(
    codec: Codec, params: Tree, body: Tree, rope: Rope | None, regions: Regions
) -> tuple[Reader, list[Array]]:
    """Return the reader of a codec's body, or of this shard's part of it, and the arrays that it
    reads.

    Raise ValueError, with the reason, if kernels cannot read it, or if keys cached before RoPE come
    without `rope`.
    """
    reader, arrays = codec.kernels.reader(), codec.kernels.arrays(for_kernels(params), body)
    if isinstance(reader, str):
        raise ValueError(reader)
    if not reader.turns:
        return reader, arrays
    rope = required_rope(rope)
    arrays += [rope.inverse_frequencies, rope.attention_factor]
    if regions.axis is not None:
        arrays.append(lax.axis_index(regions.axis))
    return reader.placed(regions.sink, regions.block, regions.shards), arrays


def quantize(codec: Codec, job: KernelJob, rows: RowsBKTH, launch: Launch) -> GroupedArray:
    """Quantize whole blocks of rows into the uniform groups that `job` describes."""
    format, scheme, divisor = job
    packed = quantize_rows(
        rows, _grouped_reader(codec), scheme, format.bits, divisor=divisor, launch=launch
    )
    return GroupedArray(packed.words, packed.scale, packed.zero, format)


def append_token(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    rows: Sequence[RowsBKTH],
    start: LengthsB,
    total: LengthsB,
    inputs: LayerInputs,
    limits: PositionsBT | None,
    launch: Launch,
) -> tuple[LayerState, tuple[bool, ...], Splits | None]:
    """Append the new token of each row with total > start to the windows, and the block that leaves
    them to the bodies whose blocks a kernel writes.

    Returns:
        The new state.
        Whether a kernel wrote each body.
        The attention over the windows, for `attend`, if `limits` is given.
    """
    regions, block = plan.regions, plan.regions.block
    first = regions.aged_tokens(start)
    leaving = unwritten(regions, state.intact, total) > unwritten(regions, state.intact, start)
    if regions.axis is not None:
        leaving &= regions.holds(first)
    place = regions.held_index(first)
    if regions.wraps:
        place = regions.place(first // block) * block
    places = Places(start, total > start, first, place, leaving)
    sides, specs = [], [codec.body(1, 1, block) for codec in plan.codecs]
    for side, codec in enumerate(plan.codecs):
        blocks, stored = None, load_body(specs[side], state.body[side])
        if leaves_at_once(plan, codec):
            blocks = Rows(stored)
        elif writer := block_writer(plan, codec, params[side], state.stats[side], launch):
            blocks = Blocks(jax.tree.leaves(stored), *writer)
        sides.append(Side(rows[side], state.sink[side], state.ring[side], blocks))
    queries = None if limits is None else _queries(plan, state, inputs, limits)
    after, windows = quantize_append.append_token(
        sides, places, block=block, queries=queries, launch=launch
    )

    def body(spec: Tree, before: Tree, blocks: Blocks | Rows | None) -> Tree:
        if blocks is None:
            return before
        arrays = [blocks.body] if isinstance(blocks, Rows) else blocks.body
        arrays = jax.tree.unflatten(jax.tree.structure(spec), arrays)
        return jax.tree.map(lambda spec, array: spec.store(array), spec, arrays)

    sink, ring = (tuple(getattr(side, name) for side in after) for name in ("sink", "ring"))
    bodies = tuple(
        body(spec, before, side.blocks)
        for spec, before, side in zip(specs, state.body, after, strict=True)
    )
    state = dataclasses.replace(state, sink=sink, ring=ring, body=bodies)
    return state, tuple(side.blocks is not None for side in after), windows


def block_writer(
    plan: LayerPlan, codec: Codec, params: Tree, stats: Tree, launch: Launch
) -> KernelWriter | None:
    """Return the writer of the blocks that leave the windows into a codec's body, or None if XLA
    writes them, for example if a ring does not hold whole runs."""
    regions = plan.regions
    if (
        plan.cross_layer is not None
        or not regions.body_capacity
        or regions.ring_slots != regions.recent + regions.block
    ):
        return None
    writer = codec.kernels.writer(params, stats, False)
    if codec.facts.stores_rows:
        writer = KernelWriter(RowBlocks(math.gcd(regions.block, SPAN)), [])
    elif isinstance(writer, KernelJob):
        job, divisor = writer, []
        if job.divisor is not None:
            divisor = [job.divisor.astype(jnp.float32)]
        reader = _grouped_reader(codec)
        writer = KernelWriter(
            GroupedBlocks(Job(reader, job.scheme, job.format.bits, bool(divisor), 1, launch.asm)),
            divisor,
        )
    if writer is None or regions.ring_slots % writer.blocks.run:
        return None
    if launch.route == "triton" or has_triton():
        return writer
    return None if mosaic.unwritten(writer.blocks) else writer


def _grouped_reader(codec: Codec) -> GroupedReader:
    reader = codec.kernels.reader()
    reader = reader.inner if isinstance(reader, RotatedReader) else reader
    assert isinstance(reader, GroupedReader), "codecs with a kernel to quantize have uniform groups"
    return reader
