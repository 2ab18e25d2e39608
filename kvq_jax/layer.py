"""One layer of a cache: windows of exact rows around a coded body, for keys and values, and what happens to them when tokens arrive.

Every method shares this file; what differs between methods is in their codecs. The functions are pure: state in, state out.

`carry` is a value that flows through the layers of one forward pass. It is `()` for methods whose layers are independent, which are all
those whose layers this file serves; a cross-layer method brings its own plan with the same functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.array_types import LayerInputs, LengthsB, QueryBNTH, Tree
from kvq_jax.attention import dispatch, streaming
from kvq_jax.attention.dispatch import Implementation, Launch
from kvq_jax.body import Leaf, store_blocks
from kvq_jax.codec import Codec
from kvq_jax.plan import LayerPlan, LayerState
from kvq_jax.regions import Regions

ENCODE_CHUNK = 1024  # tokens of a prompt that are quantized at a time


def prefill_layer(
    plan: LayerPlan, params: Tree, state: LayerState, inputs: LayerInputs, carry: Tree, implementation: Implementation = None
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Attention of prompt tokens, and the state with them added.

    Attention is exact inside the prompt and over the windows; what was in the body before is read quantized. Rows of the batch that were
    empty get their prompt statistics here. `implementation` quantizes; attention of many tokens is XLA's.
    """
    params = params or ((), ())
    state = _with_statistics(plan, params, state, inputs)
    limits = jnp.broadcast_to(plan.regions.body(inputs.positions[:, :1]), inputs.positions.shape)
    out = streaming.attend(plan, params, state, state.body, inputs, limits)
    how = dispatch.choose(implementation, plan, inputs.q_rot.shape[1], 1, inputs.q_rot.shape[0])
    return out, append_layer(plan, params, state, inputs, prefill=True, how=how), carry


def decode_layer(
    plan: LayerPlan, params: Tree, state: LayerState, inputs: LayerInputs, carry: Tree, implementation: Implementation = None
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Attention of T generated tokens, and the state with them added. The result is that of T single steps: each token sees the body as it
    was at its turn. `implementation`: see attention/dispatch.py."""
    params = params or ((), ())
    batch, heads, tokens, _ = inputs.q_rot.shape
    how = dispatch.choose(implementation, plan, heads, tokens, batch)
    after = append_layer(plan, params, state, inputs, prefill=False, how=how)
    limits = plan.regions.body(inputs.positions + 1)
    return dispatch.attend(plan, params, state, after.body, inputs, limits, how), after, carry


def append_layer(
    plan: LayerPlan, params: Tree, state: LayerState, inputs: LayerInputs, *, prefill: bool, how: Launch | None = None
) -> LayerState:
    """The state with the valid tokens of `inputs` added: the window rows are written, and whole blocks that age out are coded into the
    body, by a kernel where `how` launches one."""
    regions = plan.regions
    start = inputs.positions[:, 0]
    total = start + jnp.sum(inputs.valid, axis=1, dtype=start.dtype)
    sink, ring, body = [], [], []
    for side, codec in enumerate(plan.codecs):
        rows = codec.rows((params or ((), ()))[side], inputs).astype(state.ring[side].dtype)
        sink.append(_refresh(state.sink[side], rows, jnp.arange(regions.sink_slots)[None], start, total))
        ring.append(_refresh(state.ring[side], rows, regions.ring_positions(total), start, total))
        body.append(_age(regions, codec, (params or ((), ()))[side], state, side, rows, start, total, prefill, how))
    return dataclasses.replace(state, sink=tuple(sink), ring=tuple(ring), body=tuple(body))


def _with_statistics(plan: LayerPlan, params: Tree, state: LayerState, inputs: LayerInputs) -> LayerState:
    fresh = (inputs.positions[:, 0] == 0) & inputs.valid[:, 0]

    def select(new: Array, old: Array) -> Array:
        return jnp.where(fresh.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    found = tuple(codec.statistics(p, inputs, plan.regions.sink) for codec, p in zip(plan.codecs, params, strict=True))
    return dataclasses.replace(state, stats=jax.tree.map(select, found, state.stats))


def _refresh(
    slots: Float[Array, "B K E C"], rows: Float[Array, "B K T C"], held: Int[Array, "B E"], start: LengthsB, total: LengthsB
) -> Float[Array, "B K E C"]:
    """Window slots after new tokens: slot e takes the row of position held[e] where that position is new, and keeps its row otherwise."""
    new = (held >= start[:, None]) & (held < total[:, None])
    index = jnp.clip(held - start[:, None], 0, rows.shape[2] - 1)
    return jnp.where(new[:, None, :, None], take_tokens(rows, index), slots)


def take_tokens(rows: Float[Array, "B K T C"], index: Int[Array, "B E"]) -> Float[Array, "B K E C"]:
    """rows[b, :, index[b]]."""
    return jnp.take_along_axis(rows, index[:, None, :, None], axis=2, mode="clip")


def _by_chunks(code: Callable[[Array], Tree], block: Tree, rows: Float[Array, "B K T C"], tokens: int) -> Tree:
    """code(rows), ENCODE_CHUNK tokens at a time, which bounds what quantizing a long prompt needs beside its rows. `block` describes the
    arrays of one block of `tokens` tokens."""
    blocks, per_chunk = rows.shape[2] // tokens, max(1, ENCODE_CHUNK // tokens)
    chunks = -(-blocks // per_chunk)
    if chunks == 1:
        return code(rows)
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, (chunks * per_chunk - blocks) * tokens), (0, 0)))
    coded = lax.map(lambda i: code(lax.dynamic_slice_in_dim(padded, i * per_chunk * tokens, per_chunk * tokens, 2)), jnp.arange(chunks))

    def joined(leaf: Leaf, found: Array) -> Array:
        axis = leaf.token_axis
        whole = jnp.moveaxis(found, 0, axis)
        whole = whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])
        return lax.slice_in_dim(whole, 0, blocks * leaf.entries, axis=axis)

    return jax.tree.map(joined, block, coded)


def _age(
    regions: Regions,
    codec: Codec,
    params: Tree,
    state: LayerState,
    side: int,
    rows: Array,
    start: LengthsB,
    total: LengthsB,
    prefill: bool,
    how: Launch | None,
) -> Tree:
    """The body with the blocks that leave the window when `start` tokens become `total`."""
    block, tokens = regions.block, rows.shape[2]
    blocks = min(-(-tokens // block), regions.body_capacity // block)
    if not blocks:
        return state.body[side]
    first = regions.body(start)
    leaving = (regions.body(total) - first) // block  # [B], at most `blocks`
    position = (regions.sink + first)[:, None] + jnp.arange(blocks * block)[None]
    index = jnp.where(position < start[:, None], regions.ring_slot(position), regions.ring_slots + position - start[:, None])

    def encode() -> Tree:
        source = take_tokens(jnp.concatenate([state.ring[side], rows], axis=2), index)
        code = functools.partial(dispatch.encode, codec, params, state.stats[side], prefill=prefill, how=how)
        return code(source) if how is not None else _by_chunks(code, codec.body(1, 1, block), source, block)

    def nothing() -> Tree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(encode))

    # In a decode step only every block-th token ages anything, and the branch returns one block: a branch that returned the body would
    # copy it.
    coded = encode() if tokens > block else lax.cond(jnp.any(leaving > 0), encode, nothing)
    return store_blocks(codec.body(1, 1, block), state.body[side], coded, first // block, leaving)
