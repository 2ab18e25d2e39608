"""Call the C++ kernels with the arrays of caches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cpu_kernels import store
from cpu_kernels.attention import NEAR, TOGETHER, WINDOW_DTYPES, ExactRows, Ring, decode_attention
from cpu_kernels.body import Body
from kvq_jax.attention import online_softmax, streaming
from kvq_jax.attention.body_view import BodyView, rotated_back
from kvq_jax.attention.logits import first_inside, inside_window
from kvq_jax.codecs.codec import Codec, required_rope
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, QueryBNTH, Tree
from kvq_jax.types.rope import Rope, cosines_and_sines
from pallas_kernels.decode_attention.partial_attention import PartialAttention

# Of sink and ring.
WindowRows = tuple[Float[Array, "B K E0 H"], Float[Array, "B K E1 H"]]


def attend(
    plan: LayerPlan,
    params: Tree,
    before: LayerState,
    after: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
) -> QueryBNTH:
    """Attend as `streaming.attend` does.

    One query token takes one kernel call, which also reads the windows, or two. Several query
    tokens, or windows that both sides share, go through `read_body`.
    """
    if not _reads_windows(plan, after, inputs):
        return streaming.attend(plan, params, before, body, inputs, limits, read_body)
    batch, heads, _, head_dim = inputs.q_rot.shape
    rows = inputs.q_rot.reshape(batch, plan.heads, heads // plan.heads, head_dim)
    positions, real = _slots(plan, inputs)
    inside = inside_window(plan.attention, inputs.positions, positions)
    seen = real & inside & streaming.outside_body(plan.regions, positions, limits)
    windows = ExactRows(rows, seen, *_window_rows(plan, params, after, positions, inputs.rope))
    view = BodyView(plan, params, after.stats, body, inputs.rope)
    read = functools.partial(
        _read, view, streaming.written_tokens(inputs, limits), rows, inputs.positions
    )
    if plan.v.kernels.sum is None:
        part = read(limits, windows)
    else:  # what follows the sum over the body does not follow that over the windows
        of_body = _summed(view, read(limits, None))
        part = online_softmax.merge(of_body, read(jnp.zeros_like(limits), windows))
    return streaming.output_of(plan, part, inputs.q_rot, inputs.sinks)


def _reads_windows(plan: LayerPlan, state: LayerState, inputs: LayerInputs) -> bool:
    if inputs.q_rot.shape[2] > 1 or not plan.regions.held_capacity:
        return False
    if plan.regions.axis is not None:  # all shards have the windows, which count once
        return False
    return not plan.joint and state.ring[0].dtype.name in WINDOW_DTYPES


def _window_rows(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    positions: Int[Array, "B E"],
    rope: Rope | None,
) -> tuple[WindowRows, WindowRows, tuple[Array, Array] | tuple[()]]:
    """Return the keys and the values of (sink, ring), and the cosines and sines by which the kernel
    rotates the keys, if it rotates those of the body. positions: of the slots."""
    of_sink, of_ring = jnp.split(positions, [plan.regions.sink_slots], axis=1)
    rotated = plan.k.facts.form == "before_rope"
    keys, values = (
        (
            codec.vectors(params[side], state.sink[side], of_sink, rope),
            codec.vectors(params[side], state.ring[side], of_ring, rope),
        )
        if side or not rotated
        else (state.sink[side], state.ring[side])
        for side, codec in enumerate(plan.codecs)
    )
    turns = cosines_and_sines(positions, required_rope(rope)) if rotated else ()
    return keys, values, turns


def _slots(plan: LayerPlan, inputs: LayerInputs) -> tuple[Int[Array, "B E"], Bool[Array, "B E"]]:
    """Return (positions, mask of those that hold a token) of the slots of sink and ring, once the
    query's token is in them."""
    start = inputs.positions[:, :1]
    tokens = start + inputs.valid[:, :1].astype(start.dtype)
    return streaming.window_slots(plan.regions, tokens)


def read_body(
    view: streaming.View,
    queries: streaming.Queries,
    rows: Float[Array, "B K R H"],
    part: PartialAttention,
) -> PartialAttention:
    """Return `part` with the body added, as `streaming.read_chunks` does, by the C++ kernel."""
    if not view.plan.regions.held_capacity:
        return part
    stored = BodyView(view.plan, view.params, view.stats, view.body, view.rope)
    of_body = _read(stored, view.written, rows, queries.positions, queries.limits, None)
    return online_softmax.merge(part, _summed(stored, of_body))


def _summed(view: BodyView, part: PartialAttention) -> PartialAttention:
    """Return `part`, over a body, with what its values' codec does to a sum."""
    return part._replace(o=view.plan.v.kernels.summed(view.stats[-1], part.o))


def _read(
    view: BodyView,
    written: LengthsB,
    rows: Float[Array, "B K R H"],
    positions: PositionsBT,
    limits: PositionsBT,
    windows: ExactRows | None,
) -> PartialAttention:
    """Return the attention over the body tokens below the limits, and over the windows, before
    `_summed`."""
    plan, regions, attention = view.plan, view.plan.regions, view.plan.attention
    capacity = regions.held_capacity
    sides = zip(plan.codecs, view.params, view.body, strict=True)
    keys, values = (_body_and_arrays(*side) for side in sides)
    query = plan.k.query(view.params[0], view.stats[0], rows)
    if keys[0].rotated:
        keys = keys[0], [*keys[1], *_rope_tables(view.rope, regions.sink, capacity)]
    ring = None
    if regions.wraps:
        ring = Ring(regions.read_capacity, written)
        if keys[0].rotated:
            begun = written // ring.tokens * ring.tokens
            query, before = rotated_back(query, begun, ring.tokens, required_rope(view.rope))
            ring = ring._replace(q_before=before)
    lower = first_inside(attention, regions.sink, positions)
    m, l, o = decode_attention(
        query,
        keys,
        values,
        regions.held(limits),
        capacity=capacity,
        windows=windows,
        lower=None if lower is None else regions.held_before(lower),
        ring=ring,
        scale=attention.scale,
        soft_cap=attention.soft_cap,
    )
    return PartialAttention(m, l, o)


def _body_and_arrays(codec: Codec, params: Tree, body: Tree) -> tuple[Body, list[Array]]:
    description = codec.kernels.native()
    if isinstance(description, str):
        raise ValueError(description)
    return description, codec.kernels.arrays(params, body)


def _rope_tables(rope: Rope | None, sink: int, capacity: int) -> list[Float[Array, "2 n half"]]:
    """Return the cosines and sines by which the kernel rotates keys cached before RoPE.

    The first table is for TOGETHER neighbouring tokens, times RoPE's attention factor. The second
    is for NEAR runs of TOGETHER tokens, the third for every NEAR-th run of the body. A position is
    the sum of one entry of each, so the tables hardly grow with the capacity.
    """
    rope = required_rope(rope)
    steps = jnp.arange(TOGETHER, dtype=jnp.int32)
    near = jnp.arange(0, min(capacity, NEAR * TOGETHER), TOGETHER, dtype=jnp.int32)
    far = jnp.arange(sink, sink + capacity, NEAR * TOGETHER, dtype=jnp.int32)
    plain = dataclasses.replace(rope, attention_factor=jnp.ones((), jnp.float32))
    tables = ((steps, rope), (near, plain), (far, plain))
    return [
        jnp.concatenate(cosines_and_sines(positions[None], turned)) for positions, turned in tables
    ]


def store_blocks(block: Tree, stored: Tree, values: Tree, first: LengthsB, count: LengthsB) -> Tree:
    """Write blocks as `arrays.stored.store_blocks` does, by the C++ kernel."""
    specs, structure = jax.tree.flatten(block)
    arrays = zip(specs, structure.flatten_up_to(values), strict=True)
    new = [spec.store(array) for spec, array in arrays]
    tokens: list[tuple[int, int]] = [(spec.axis("tokens"), spec["tokens"].size) for spec in specs]
    axes, entries = zip(*tokens, strict=True)
    old = structure.flatten_up_to(stored)
    written = store.store_blocks(old, new, first, count, axes=axes, entries=entries)
    return structure.unflatten(written)


def put_rows(
    slots: Float[Array, "B K E C"], rows: Float[Array, "B K 1 C"], new: Bool[Array, "B E"]
) -> Float[Array, "B K E C"]:
    """Return the slots of a window with rows[b, :, 0] in the slot that new[b] marks, if any.
    Nothing else is written."""
    if not slots.shape[2]:
        return slots
    first, count = jnp.argmax(new, axis=1), jnp.sum(new, axis=1)  # at most one
    [written] = store.store_blocks([slots], [rows], first, count, axes=[2], entries=[1])
    return written
