"""The update of one layer of a cache: new tokens enter the full-precision windows, and blocks that
age out are quantized into the body.

All methods share this file; they differ in their codecs. The functions are pure: state in, state
out.

`carry` is a value that flows through the layers of one forward pass: `()` for methods whose layers
are independent, the accumulator for cross-layer methods (cross_layer.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.arrays.stored import BodySpec
from kvq_jax.attention import dispatch, native, streaming
from kvq_jax.attention.dispatch import XLA, Route
from kvq_jax.codecs.codec import Codec, Origin
from kvq_jax.layer import cross_layer
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

    Attention is exact inside the prompt and over the windows; tokens that were in the body before
    are read as they were quantized. Rows of the batch that were empty get their prompt statistics
    here. `route` chooses what quantizes; XLA does the attention of prompts.
    """
    params = by_side(params)
    state = _with_statistics(plan, params, state, inputs)
    limits = jnp.broadcast_to(plan.regions.body(inputs.positions[:, :1]), inputs.positions.shape)
    quantizer = route if route.launch else XLA
    after = append_layer(plan, params, state, inputs, carry, prefill=True, route=quantizer)
    carry = cross_layer.advance(plan, params, after, _body_tokens(plan, inputs), carry)
    out = streaming.attend(plan, params, state, plan.readable(state.body, carry), inputs, limits)
    return streaming.without_lost(plan, inputs.positions, out), after, carry


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

    The result is that of T single steps: each token sees the body as it would be at its own step.
    `route`: see attention/dispatch.py.
    """
    params = by_side(params)
    # past the capacity a token sees nothing that is real; without the bound it would see a block
    # more than there is
    limits = jnp.minimum(plan.regions.body(inputs.positions + 1), plan.regions.body_capacity)
    after, windows = _append(
        plan,
        params,
        state,
        inputs,
        carry,
        limits,
        prefill=False,
        route=route,
    )
    carry = cross_layer.advance(plan, params, after, _body_tokens(plan, inputs), carry)
    return (
        dispatch.attend(
            plan,
            params,
            state,
            after,
            plan.readable(after.body, carry),
            inputs,
            limits,
            windows,
            route,
        ),
        after,
        carry,
    )


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
    body, by a fused kernel if one is `chosen`. Cross-layer methods read `carry`.
    """
    return _append(
        plan,
        by_side(params),
        state,
        inputs,
        carry,
        None,
        prefill=prefill,
        route=route,
    )[0]


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
    """Return what `append_layer` does and, with the limits of what is read from the body, what a
    kernel found in the windows on its way."""
    regions = plan.regions
    start = inputs.positions[:, 0]
    total = start + jnp.sum(inputs.valid, axis=1, dtype=start.dtype)
    rows = [
        codec.rows(own, inputs).astype(ring.dtype)
        for codec, own, ring in zip(plan.codecs, params, state.ring, strict=False)
    ]
    after, aged, windows = None, (False, False), None
    if not prefill and inputs.positions.shape[1] == 1:
        after, aged, windows = dispatch.append_token(
            plan, params, state, rows, start, total, inputs, limits, route
        )
    if after is None:
        held, in_ring = (
            jnp.broadcast_to(jnp.arange(regions.sink_slots), (len(start), regions.sink_slots)),
            regions.ring_positions(total),
        )
        sink = tuple(
            _refresh(slots, new, held, start, total, route)
            for slots, new in zip(state.sink, rows, strict=True)
        )
        ring = tuple(
            _refresh_ring(slots, new, in_ring, start, total, route)
            for slots, new in zip(state.ring, rows, strict=True)
        )
        after = dataclasses.replace(state, sink=sink, ring=ring)
    body = (
        (
            after.body[side]
            if aged[side]
            else _age(
                plan,
                codec,
                params[side],
                state,
                side,
                rows[side],
                after.ring[side],
                start,
                total,
                carry,
                prefill,
                route,
            )
        )
        for side, codec in enumerate(plan.codecs)
    )
    return dataclasses.replace(after, body=tuple(body)), windows


def _body_tokens(plan: LayerPlan, inputs: LayerInputs) -> LengthsB:
    """Return the number of body tokens of each row once the valid tokens of `inputs` are added."""
    start = inputs.positions[:, 0]
    return plan.regions.body(start + jnp.sum(inputs.valid, axis=1, dtype=start.dtype))


def _with_statistics(
    plan: LayerPlan, params: Tree, state: LayerState, inputs: LayerInputs
) -> LayerState:
    fresh = (inputs.positions[:, 0] == 0) & inputs.valid[:, 0]

    def select(spec: ArraySpec, new: Array, old: Array) -> Array:
        return jnp.where(spec.along("batch", fresh), new, old)

    specs = tuple(codec.statistics.spec(1, plan.heads) for codec in plan.codecs)
    prompt = tuple(
        codec.statistics.of(p, inputs) for codec, p in zip(plan.codecs, params, strict=False)
    )
    return dataclasses.replace(state, stats=jax.tree.map(select, specs, prompt, state.stats))


def _refresh(
    slots: Float[Array, "B K E C"],
    rows: Float[Array, "B K T C"],
    held: Int[Array, "B E"],
    start: LengthsB,
    total: LengthsB,
    route: Route,
) -> Float[Array, "B K E C"]:
    """Return the window slots after new tokens: slot e takes the row at position held[e] if that
    position is new, else keeps its row."""
    new = (held >= start[:, None]) & (held < total[:, None])
    if route.name == "native" and rows.shape[2] == 1:
        return native.put_rows(slots, rows, new)
    index = jnp.clip(held - start[:, None], 0, rows.shape[2] - 1)
    return jnp.where(new[:, None, :, None], take_tokens(rows, index), slots)


def _refresh_ring(
    slots: Float[Array, "B K R C"],
    rows: Float[Array, "B K T C"],
    held: Int[Array, "B R"],
    start: LengthsB,
    total: LengthsB,
    route: Route,
) -> Float[Array, "B K R C"]:
    """Return what `_refresh` does. On a GPU, one new token is one row written, and not the whole
    ring read and written: a fifth of the bytes of 4K tokens in 4 bits. The CPU backend would widen
    all of a ring of 16 bits to write one row.
    """

    def whole() -> Array:
        return _refresh(slots, rows, held, start, total, route)

    if rows.shape[2] > 1 or route.name == "native":
        return whole()
    new = (held >= start[:, None]) & (held < total[:, None])
    return lax.platform_dependent(cpu=whole, default=lambda: put_rows(slots, rows, new))


def put_rows(
    slots: Float[Array, "B K E C"], rows: Float[Array, "B K 1 C"], new: Bool[Array, "#B E"]
) -> Float[Array, "B K E C"]:
    """Return the slots with rows[b] in the one that new[b] marks, if it marks one: nothing else is
    written."""

    def put(slots: Array, row: Array, new: Array) -> Array:
        at = jnp.argmax(new)
        kept = lax.dynamic_slice_in_dim(slots, at, 1, axis=1)
        return lax.dynamic_update_slice_in_dim(slots, jnp.where(new[at], row, kept), at, axis=1)

    new = jnp.broadcast_to(new, (len(slots), new.shape[1]))
    return (
        jax.vmap(put)(slots, rows, new) if len(slots) > 1 else put(slots[0], rows[0], new[0])[None]
    )


def take_tokens(rows: Float[Array, "B K T C"], index: Int[Array, "B E"]) -> Float[Array, "B K E C"]:
    """Return rows[b, :, index[b]] for every batch row b."""
    return jnp.take_along_axis(rows, index[:, None, :, None], axis=2, mode="clip")


def _by_chunks(code: Callable[[Tree], Tree], block: Tree, source: Tree, tokens: int) -> Tree:
    """Return code(source), computed ENCODE_CHUNK tokens at a time, which bounds the memory that
    quantizing a long prompt takes.

    Arrays of `source` have their tokens on axis 2; `block` describes the quantized arrays of one
    block of `tokens` tokens.
    """
    blocks, per_chunk = (
        jax.tree.leaves(source)[0].shape[2] // tokens,
        max(1, ENCODE_CHUNK // tokens),
    )
    chunks = -(-blocks // per_chunk)
    if chunks == 1:
        return code(source)
    missing = (chunks * per_chunk - blocks) * tokens
    padded = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, missing), (0, 0))), source)

    def one(i: Array) -> Tree:
        at, count = i * per_chunk * tokens, per_chunk * tokens
        return code(jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, at, count, 2), padded))

    coded = lax.map(one, jnp.arange(chunks))

    def joined(spec: BodySpec, chunks: Array) -> Array:
        axis = spec.axis("tokens")
        whole = jnp.moveaxis(chunks, 0, axis)
        whole = whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])
        return lax.slice_in_dim(whole, 0, blocks * spec["tokens"].size, axis=axis)

    return jax.tree.map(joined, block, coded)


def _age(
    plan: LayerPlan,
    codec: Codec,
    params: Tree,
    state: LayerState,
    side: int,
    rows: Array,
    ring: Array,
    start: LengthsB,
    total: LengthsB,
    carry: Tree,
    prefill: bool,
    route: Route,
) -> Tree:
    """Return the body with the blocks added that leave the window when `start` tokens become
    `total`. ring: with these tokens in it."""
    regions = plan.regions
    block, tokens = regions.block, rows.shape[2]
    blocks = regions.most_held(min(-(-tokens // block), regions.body_capacity // block))
    if not blocks:
        return state.body[side]
    first = regions.held(regions.body(start))
    leaving = (regions.held(regions.body(total)) - first) // block  # [B], at most `blocks`
    step = (
        tokens == 1 and not prefill
    )  # what leaves is still in the ring, which has room for a block more than it must hold
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
            return dispatch.quantize(
                codec,
                params,
                state.stats[side],
                coded,
                Origin(position[:, 0, :, 0], prefill),
                route,
            )

        whole = source, below, position[:, None, :, None]
        return (
            code(whole) if route.launch else _by_chunks(code, codec.body(1, 1, block), whole, block)
        )

    def nothing() -> Tree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(encode))

    # In a decode step only every block-th token makes a block age. The branch returns that block
    # and not the body, which it would copy.
    coded = encode() if tokens >= block else lax.cond(jnp.any(leaving > 0), encode, nothing)
    return dispatch.store_blocks(
        codec.body(1, 1, block), state.body[side], coded, first // block, leaving, route
    )
