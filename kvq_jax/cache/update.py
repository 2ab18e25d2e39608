"""Update one layer of a cache: new tokens enter the full-precision windows, and blocks that age out
are quantized into the body.

All methods share this file and differ in their codecs. The functions are pure: state in, state out.

`carry` is a value that flows through the layers of one forward pass: `()` for methods whose layers
are independent, the accumulator for cross-layer methods (cross_layer.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.arrays.stored import BodySpec
from kvq_jax.attention import dispatch, native
from kvq_jax.attention.dispatch import XLA, Route
from kvq_jax.cache.wrapped_body import with_blocks
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.kernels import KernelJob
from kvq_jax.layer import cross_layer
from kvq_jax.layer.kept_codes import unwritten
from kvq_jax.layer.plan import LayerPlan, LayerState, by_side
from kvq_jax.types.array_types import ArraySpec, LayerInputs, LengthsB, PositionsBT, QueryBNTH, Tree

ENCODE_CHUNK = 1024  # tokens of a prompt that are quantized at a time


def prefill_layer(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
    route: Route = XLA,
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Return (out, state, carry): attention of prompt tokens, and the layer's state with them
    added.

    Attention is exact inside the prompt and over the windows. Tokens that were in the body before
    are read dequantized. Rows of the batch that were empty get their prompt statistics here, and
    those that widen do so until a block is quantized, in `decode_layer` too. `route` chooses the
    code that quantizes and the one that attends.
    """
    params = by_side(params)
    state = _with_statistics(plan, params, state, inputs, prefill=True)
    limits = jnp.broadcast_to(
        plan.regions.aged_tokens(inputs.positions[:, :1]), inputs.positions.shape
    )
    quantizer = route if route.launch else XLA
    after = append_layer(plan, params, state, inputs, carry, prefill=True, route=quantizer)
    carry = cross_layer.advance(plan, params, after, _body_tokens(plan, inputs), carry)
    body = plan.readable(state.body, carry)
    out = dispatch.attend_prompt(plan, params, state, body, inputs, limits, route)
    return out, after, carry


def decode_layer(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
    route: Route = XLA,
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Return (out, state, carry): attention of T generated tokens, and the layer's state with them
    added.

    The result equals T single steps: each token sees the body as it would be at its own step.
    `route`: see attention/dispatch.py.
    """
    tokens, slack = inputs.positions.shape[1], plan.regions.slack
    if plan.regions.wraps and tokens > slack:  # more would take the slots of tokens that are seen
        outs = []
        for at in range(0, tokens, slack):
            part = _part_of(inputs, at, min(slack, tokens - at))
            out, state, carry = decode_layer(plan, params, state, part, carry, route)
            outs.append(out)
        return jnp.concatenate(outs, axis=2), state, carry
    params = by_side(params)
    state = _with_statistics(plan, params, state, inputs, prefill=False)
    # A token past the capacity sees nothing real. Without the bound it would see a block too many.
    limits = jnp.minimum(plan.regions.aged_tokens(inputs.positions + 1), plan.regions.body_capacity)
    after, windows = _append(plan, params, state, inputs, carry, limits, prefill=False, route=route)
    carry = cross_layer.advance(plan, params, after, _body_tokens(plan, inputs), carry)
    body = plan.readable(after.body, carry)
    out = dispatch.attend(plan, params, state, after, body, inputs, limits, windows, route)
    return out, after, carry


def _part_of(inputs: LayerInputs, first: int, count: int) -> LayerInputs:
    """Return `count` of the new tokens from `first` on."""

    def cut(array: Array | None, axis: int) -> Array | None:
        if array is None:
            return None
        return lax.slice_in_dim(array, first, first + count, axis=axis)

    by_axis = {
        1: ("x", "residual", "positions", "valid"),
        2: ("q_pre", "q_rot", "k_pre", "k_rot", "v"),
    }
    parts = {n: cut(getattr(inputs, n), axis) for axis, names in by_axis.items() for n in names}
    return dataclasses.replace(inputs, **parts)


def append_layer(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
    *,
    prefill: bool,
    route: Route = XLA,
) -> LayerState:
    """Return the state with the valid tokens of `inputs` added.

    Their rows are written to the windows, and whole blocks that age out are quantized into the
    body, by a fused kernel if `route` names one. Cross-layer methods read `carry`.
    """
    params = by_side(params)
    return _append(plan, params, state, inputs, carry, None, prefill=prefill, route=route)[0]


def _append(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
    limits: PositionsBT | None,
    *,
    prefill: bool,
    route: Route,
) -> tuple[LayerState, Tree]:
    """Return the state from `append_layer` and, if `limits` is given, the attention over the
    windows that a fused kernel computed on its way."""
    regions = plan.regions
    start = inputs.positions[:, 0]
    total = start + jnp.sum(inputs.valid, axis=1, dtype=start.dtype)
    rows = [
        codec.rows(side_params, inputs).astype(ring.dtype)
        for codec, side_params, ring in zip(plan.codecs, params, state.ring, strict=False)
    ]
    # nothing remains in a row that starts
    state = dataclasses.replace(
        state,
        intact=jnp.where(start == 0, 0, state.intact),
        floor=None if state.floor is None else jnp.where(start == 0, 0, state.floor),
    )
    after, aged, windows = None, (False, False), None
    if not prefill and inputs.positions.shape[1] == 1:
        after, aged, windows = dispatch.append_token(
            plan, params, state, rows, start, total, inputs, limits, route
        )
    if after is None:
        in_sink = jnp.arange(regions.sink_slots, dtype=jnp.int32)
        in_sink = jnp.broadcast_to(in_sink, (len(start), regions.sink_slots))
        in_ring = regions.ring_positions(total)
        sink = tuple(
            _refresh(slots, new, in_sink, start, total, route)
            for slots, new in zip(state.sink, rows, strict=True)
        )
        ring = tuple(
            _refresh_ring(slots, new, in_ring, start, total, route)
            for slots, new in zip(state.ring, rows, strict=True)
        )
        after = dataclasses.replace(state, sink=sink, ring=ring)

    def body_of(side: int) -> Tree:
        if aged[side]:
            return after.body[side]
        new = Arrival(rows[side], after.ring[side], start, total)
        return _age(plan, side, params[side], state, new, carry, prefill=prefill, route=route)

    body = tuple(map(body_of, range(len(plan.codecs))))
    return dataclasses.replace(after, body=body), windows


def _body_tokens(plan: LayerPlan, inputs: LayerInputs) -> LengthsB:
    """Return the number of body tokens of each row once the valid tokens of `inputs` are added."""
    start = inputs.positions[:, 0]
    return plan.regions.aged_tokens(start + jnp.sum(inputs.valid, axis=1, dtype=start.dtype))


def _with_statistics(
    plan: LayerPlan, params: Tree, state: LayerState, inputs: LayerInputs, *, prefill: bool
) -> LayerState:
    """Return the state with the statistics of rows that get their first prompt, and with those that
    widen taken from the tokens that come while no codes exist.

    A token that is generated counts if none exist at its own step, whatever comes with it.
    """
    start = inputs.positions[:, :1]
    fresh = prefill & (start == 0)[:, 0] & inputs.valid[:, 0]
    uncoded = plan.regions.aged_tokens(start if prefill else inputs.positions) == 0
    uncoded &= (start == 0) | (state.intact == 0)[:, None]
    early = dataclasses.replace(inputs, valid=inputs.valid & uncoded)
    widened = jnp.any(early.valid, axis=1)

    def updated(codec: Codec, params: Tree, old: Tree) -> Tree:
        statistics = codec.statistics
        if not (prefill or statistics.widens):
            return old
        tokens = early if statistics.widens else inputs

        def select(spec: ArraySpec, new: Array, old: Array) -> Array:
            if statistics.widens:
                wider = jnp.maximum(old, new)
                old = jnp.where(spec.along("batch", widened), wider, old)
            return jnp.where(spec.along("batch", fresh), new, old)

        return jax.tree.map(
            select, statistics.spec(1, plan.heads), statistics.of(params, tokens), old
        )

    sides = zip(plan.codecs, params, state.stats, strict=False)
    return dataclasses.replace(state, stats=tuple(updated(*side) for side in sides))


def _refresh(
    slots: Float[Array, "B K E C"],
    rows: Float[Array, "B K T C"],
    positions: Int[Array, "B E"],
    start: LengthsB,
    total: LengthsB,
    route: Route,
) -> Float[Array, "B K E C"]:
    """Return the window slots after new tokens: slot e takes the row at positions[e] if that
    position is new, else keeps its row."""
    new = (positions >= start[:, None]) & (positions < total[:, None])
    if route.name == "native" and rows.shape[2] == 1:
        return native.put_rows(slots, rows, new)
    index = jnp.clip(positions - start[:, None], 0, rows.shape[2] - 1)
    return jnp.where(new[:, None, :, None], take_tokens(rows, index), slots)


def _refresh_ring(
    slots: Float[Array, "B K R C"],
    rows: Float[Array, "B K T C"],
    positions: Int[Array, "B R"],
    start: LengthsB,
    total: LengthsB,
    route: Route,
) -> Float[Array, "B K R C"]:
    """Refresh the ring as `_refresh` does, but write only the row of a single new token on a GPU.

    To read and write the whole ring takes a fifth of the bytes of 4K tokens in 4 bits. The CPU
    backend would widen all of a 16-bit ring to write one row.
    """

    def whole() -> Array:
        return _refresh(slots, rows, positions, start, total, route)

    if rows.shape[2] > 1 or route.name == "native":
        return whole()
    new = (positions >= start[:, None]) & (positions < total[:, None])
    return lax.platform_dependent(cpu=whole, default=lambda: put_rows(slots, rows, new))


def put_rows(
    slots: Float[Array, "B K E C"], rows: Float[Array, "B K 1 C"], new: Bool[Array, "#B E"]
) -> Float[Array, "B K E C"]:
    """Return the slots with rows[b] in the slot that new[b] marks, if any. Nothing else is
    written."""

    def put(slots: Array, row: Array, new: Array) -> Array:
        at = jnp.argmax(new)
        old = lax.dynamic_slice_in_dim(slots, at, 1, axis=1)
        return lax.dynamic_update_slice_in_dim(slots, jnp.where(new[at], row, old), at, axis=1)

    new = jnp.broadcast_to(new, (len(slots), new.shape[1]))
    if len(slots) > 1:
        return jax.vmap(put)(slots, rows, new)
    return put(slots[0], rows[0], new[0])[None]


def take_tokens(rows: Float[Array, "B K T C"], index: Int[Array, "B E"]) -> Float[Array, "B K E C"]:
    """Return rows[b, :, index[b]] for every batch row b."""
    return jnp.take_along_axis(rows, index[:, None, :, None], axis=2, mode="clip")


def _by_chunks(code: Callable[[Tree], Tree], block: Tree, source: Tree, tokens: int) -> Tree:
    """Return code(source), computed ENCODE_CHUNK tokens at a time to bound the memory of quantizing
    a long prompt.

    Arrays of `source` have their tokens on axis 2. `block` describes the quantized arrays of one
    block of `tokens` tokens.
    """
    blocks = jax.tree.leaves(source)[0].shape[2] // tokens
    per_chunk = max(1, ENCODE_CHUNK // tokens)
    chunks = -(-blocks // per_chunk)
    if chunks == 1:
        return code(source)
    missing = (chunks * per_chunk - blocks) * tokens
    padded = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, missing), (0, 0))), source)

    def encode_chunk(i: Array) -> Tree:
        at, count = i * per_chunk * tokens, per_chunk * tokens
        return code(jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, at, count, 2), padded))

    coded = lax.map(encode_chunk, jnp.arange(chunks, dtype=jnp.int32))

    def joined(spec: BodySpec, chunks: Array) -> Array:
        axis = spec.axis("tokens")
        whole = jnp.moveaxis(chunks, 0, axis)
        whole = whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])
        return lax.slice_in_dim(whole, 0, blocks * spec["tokens"].size, axis=axis)

    return jax.tree.map(joined, block, coded)


class Arrival(NamedTuple):
    """New tokens of one side: their rows [B, K, T, C], the ring that holds them, and the tokens of
    each sequence before and after."""

    rows: Array
    ring: Array
    start: LengthsB
    total: LengthsB


def _age(
    plan: LayerPlan,
    side: int,
    params: Tree,
    state: LayerState,
    new: Arrival,
    carry: Tree,
    *,
    prefill: bool,
    route: Route,
) -> Tree:
    """Return the body with the blocks added that leave the window. Blocks whose codes are intact
    are not written."""
    codec, regions, (rows, ring, start, total) = plan.codecs[side], plan.regions, new
    block, tokens = regions.block, rows.shape[2]
    blocks = regions.max_held(min(-(-tokens // block), regions.block_slots))
    if not blocks:
        return state.body[side]
    first = regions.held(unwritten(regions, state.intact, start))
    end = regions.held(unwritten(regions, state.intact, total))
    if regions.wraps:
        first = jnp.maximum(first, regions.oldest(end))
    leaving = (end - first) // block  # [B], at most `blocks`
    # The block that leaves in a step is still in the ring, which has room for one block more than
    # the recent window.
    step = tokens == 1 and not prefill
    position = regions.held_positions(first, blocks * block)
    index = jnp.where(
        (position < start[:, None]) | step,
        regions.ring_slot(position),
        regions.ring_slots + position - start[:, None],
    )

    def encode() -> Tree:
        window = ring if step else jnp.concatenate([state.ring[side], rows], axis=2)
        source = take_tokens(window, index)
        below = cross_layer.tokens_of(plan, carry, regions.held_index(position - regions.sink))

        def code(source: tuple[Array, Array | None, Array]) -> Tree:
            rows, below, position = source
            coded = cross_layer.coded(codec, params, rows, below)
            at = TokensAt(position[:, 0, :, 0], prefill)
            return dispatch.quantize(codec, params, state.stats[side], coded, at, route)

        whole = source, below, position[:, None, :, None]
        job = route.launch and codec.kernels.writer(params, state.stats[side], prefill)
        if isinstance(job, KernelJob):  # a fused kernel needs no memory beside its codes
            return code(whole)
        return _by_chunks(code, codec.body(1, 1, block), whole, block)

    def nothing() -> Tree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(encode))

    # In a decode step only every block-th token makes a block age. The branch returns that block,
    # because it would copy the body.
    coded = encode() if tokens >= block else lax.cond(jnp.any(leaving > 0), encode, nothing)
    return with_blocks(plan, codec, state.body[side], coded, first // block, leaving, route)
