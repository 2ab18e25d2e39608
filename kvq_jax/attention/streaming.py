"""Attend over a layer in one pass of online softmax: full-precision rows first, then the body in
chunks.

    out = merge( [sink | ring | new tokens] , body chunk 0, body chunk 1, ... )

The body is never dequantized as a whole. One chunk at a time is read and used, and the loop's trip
count follows the live length, not the capacity. This works for every codec, on every backend, for
T >= 1 queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.arrays.stored import load_chunk
from kvq_jax.attention import online_softmax
from kvq_jax.attention.logits import attention_logits, inside_window
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, QueryBNTH, RowsBKTH, Tree
from kvq_jax.types.rope import Rope
from pallas_kernels.decode_attention.partial_attention import PartialAttention

BODY_CHUNK = 1408  # body tokens read in one step, at most
# at most, in their K, their V or their scores, for the whole batch: 2.75 MiB in fp32
# (docs/decisions/streaming_attention.md)
BODY_CHUNK_ELEMENTS = 11 << 16
EXACT_CHUNK = 1024  # full-precision rows read in one step of a long prompt
QUERY_CHUNK = 256  # queries of a long prompt that share one pass


def attend(
    plan: LayerPlan,
    params: Tree,
    windows: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    read_body: BodyReader | None = None,
    *,
    appended: bool = False,
) -> QueryBNTH:
    """Return the plan's attention over all the tokens that a query may see, [B, N, T, H] in the
    dtype of q, with fp32 accumulation. The output at padding is finite and unspecified.

    A value that is not finite makes the outputs of all queries that share a pass with one that sees
    it not finite: those of one call, or QUERY_CHUNK of them. Rows of the batch stay apart.

    Args:
        plan: the layer's plan.
        params: the layer's method parameters (keys, values).
        windows: the state *before* the tokens of `inputs` were appended. Its sink and ring are read
            together with the new rows.
        body: the arrays to read beyond the windows, see `LayerPlan.readable`.
        inputs: the new tokens.
        limits: [B, T], the number of body tokens that each query sees. Positions from sink + limit
            on are read in full precision.
        read_body: adds the body's part (default: `read_chunks`).
        appended: `windows` is the state *after* the append, and holds every new token that a query
            sees, as it does after one token. The new rows are then read as the windows store them.
    """
    view = view_of(plan, params, windows, body, inputs, limits, appended)
    queries = Queries(inputs.q_rot, inputs.positions, limits)
    return attend_view(view, queries, read_body)


def attend_view(view: View, queries: Queries, read_body: BodyReader | None = None) -> QueryBNTH:
    """Return the attention of the queries over the view and what they have attended to, as `attend`
    does."""
    read_body = read_body or read_chunks
    tokens = queries.q.shape[2]
    if tokens <= QUERY_CHUNK:
        return _attend_queries(view, queries, 0, read_body)
    chunks = -(-tokens // QUERY_CHUNK)

    def axis(array: Array) -> int:
        return min(array.ndim - 1, 2)  # [B, T] or [B, N, T, ...]

    def padded(array: Array, fill: int = 0) -> Array:
        widths = [(0, 0)] * array.ndim
        widths[axis(array)] = (0, chunks * QUERY_CHUNK - tokens)
        return jnp.pad(array, widths, constant_values=fill)

    whole = jax.tree.map(padded, queries)
    # a query at position -1 sees nothing
    whole = whole._replace(positions=padded(queries.positions, -1))

    def attend_chunk(i: Array) -> QueryBNTH:
        at = i * QUERY_CHUNK

        def cut(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(array, at, QUERY_CHUNK, axis(array))

        return _attend_queries(view, jax.tree.map(cut, whole), at, read_body)

    # [chunks, B, N, QUERY_CHUNK, H]
    out = lax.map(attend_chunk, jnp.arange(chunks, dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 2).reshape(*whole.q.shape[:3], -1)[:, :, :tokens]


def without_lost(
    plan: LayerPlan, inputs: LayerInputs, out: QueryBNTH, floor: LengthsB | None = None
) -> QueryBNTH:
    """Return attention with NaN for tokens past the capacity, and for those whose window reaches
    below `floor`, the first body token that is held after a trim. It is 0 for other tokens that are
    not stored: products of packed weights skip rows of zeros. One kernel that merges all parts
    (fused.py) has NaN for the same tokens, and what it computes for the others.

    The positions of padding are below the capacity (`layer_step.new_tokens`)."""
    lost = inputs.positions >= plan.regions.capacity
    if floor is not None:
        lost |= below_floor(plan, inputs.positions, floor) & inputs.valid
    stored = jnp.where(inputs.valid[:, None, :, None], out, 0)
    return jnp.where(lost[:, None, :, None], jnp.nan, stored)


def below_floor(plan: LayerPlan, positions: PositionsBT, floor: LengthsB) -> Bool[Array, "B T"]:
    """Return a mask of the queries whose window reaches below the first body token that is held."""
    window = plan.attention.window
    assert window is not None, "the body of a layer with a window has a floor"
    return jnp.maximum(positions - window + 1, 0) < floor[:, None]


def chunk_tokens(
    block: int, capacity: int, rows: Float[Array, "B K R H"], row_width: int = 0
) -> int:
    """Return the number of body tokens that query rows read in one step, a multiple of `block`.

    Their vectors, their scores, and their cached rows of `row_width` channels have at most
    BODY_CHUNK_ELEMENTS elements each, unless one block has more.
    """
    batch, heads, queries, head_dim = rows.shape
    widest = max(heads * head_dim, heads * queries, row_width)
    tokens = min(BODY_CHUNK, BODY_CHUNK_ELEMENTS // (batch * widest))
    return min(max(tokens // block, 1) * block, capacity)


class Queries(NamedTuple):
    """The queries of one call, or a chunk of them: q [B, N, T, H], positions [B, T], limits [B, T]
    (see `attend`).

    attended: their attention over tokens outside of the view, and its log-sum-exp [B, N, T]. None
        if they have seen nothing.
    """

    q: QueryBNTH
    positions: PositionsBT
    limits: PositionsBT
    attended: tuple[QueryBNTH, Float[Array, "B N T"]] | None = None


class View(NamedTuple):
    """The arrays that the queries of one call may read: full-precision rows (sink, ring, new
    tokens, in this order) and the body, of which each row has `written` tokens."""

    plan: LayerPlan
    params: Tree
    stats: Sides
    body: Sides
    rope: Rope | None
    sinks: Float[Array, " N"] | None
    keys: RowsBKTH
    values: RowsBKTH
    written: LengthsB
    positions: Int[Array, "B E"]
    real: Bool[Array, "B E"]


# (view, queries, their rows [B, K, R, H], attention over the full-precision rows) -> the same with
# the body added
BodyReader: TypeAlias = Callable[[View, Queries, Array, PartialAttention], PartialAttention]


def view_of(
    plan: LayerPlan,
    params: Tree,
    windows: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    appended: bool,
) -> View:
    """Return the arrays that queries may read. The arguments are `attend`'s."""
    regions = plan.regions
    start = inputs.positions[:, :1]
    if appended:
        start = start + jnp.sum(inputs.valid, axis=1, keepdims=True, dtype=start.dtype)
    old, real = window_slots(regions, start)
    positions = old if appended else jnp.concatenate([old, inputs.positions], axis=1)
    real = real if appended else jnp.concatenate([real, inputs.valid], axis=1)
    vectors = []
    for side, (codec, new) in enumerate(((plan.k, inputs.k_rot), (plan.v, inputs.v))):
        home = 0 if plan.joint else side
        rows = jnp.concatenate([windows.sink[home], windows.ring[home]], axis=2)
        cached = codec.vectors(params[side], rows, old, inputs.rope)
        if not appended:
            cached = jnp.concatenate([cached, new.astype(cached.dtype)], axis=2)
        vectors.append(cached)
    keys, values = vectors
    # a masked token has weight 0, but 0 * nan is nan
    values = jnp.where(real[:, None, :, None], values, 0)
    written = written_tokens(inputs, limits)
    arrays = windows.stats, body, inputs.rope, inputs.sinks, keys, values
    return View(plan, params, *arrays, written, positions, real)


def written_tokens(inputs: LayerInputs, limits: PositionsBT) -> LengthsB:
    """Return how many tokens were written to the body that queries with these limits read."""
    return jnp.max(jnp.where(inputs.valid, limits, 0), axis=1)


def window_slots(
    regions: Regions, tokens: Int[Array, "B 1"]
) -> tuple[Int[Array, "B E"], Bool[Array, "B E"]]:
    """Return (positions, mask of the slots that hold a token) for the slots of sink and ring, in
    this order, once `tokens` were appended."""
    sink = jnp.broadcast_to(
        jnp.arange(regions.sink_slots, dtype=tokens.dtype)[None],
        (tokens.shape[0], regions.sink_slots),
    )
    ring = regions.ring_positions(tokens[:, 0])
    real = jnp.concatenate([sink < tokens, (ring >= regions.sink) & (ring < tokens)], axis=1)
    return jnp.concatenate([sink, ring], axis=1), real


def outside_body(
    regions: Regions, positions: Int[Array, "..."], limits: Int[Array, "..."]
) -> Bool[Array, "..."]:
    """Return a mask of the positions that a query reads in full precision if it sees the first
    `limits` body tokens."""
    return (positions < regions.sink) | (positions >= regions.sink + limits)


def _attend_queries(
    view: View, queries: Queries, first: int | Array, read_body: BodyReader
) -> QueryBNTH:
    """Attend with at most QUERY_CHUNK queries: those of the new tokens from `first` on."""
    batch, heads, tokens, head_dim = queries.q.shape
    group = heads // view.plan.heads
    rows = queries.q.reshape(batch, view.plan.heads, group * tokens, head_dim)  # group-major
    part = attention_so_far(queries, view.plan.heads)
    part = _add_exact(view, queries, rows, part, first)
    add = functools.partial(read_body, view, queries, rows)
    part = online_softmax.add_across(part, view.plan.regions.axis, add)
    return output_of(view.plan, part, queries.q, view.sinks)


def attention_so_far(queries: Queries, kv_heads: int) -> PartialAttention:
    """Return the attention that the queries come with, in rows that are group-major."""
    batch, heads, tokens, head_dim = queries.q.shape
    rows = batch, kv_heads, heads // kv_heads * tokens
    if queries.attended is None:
        return online_softmax.empty(*rows, head_dim)
    out, lse = queries.attended
    m = lse.reshape(*rows, 1)
    return PartialAttention(m, jnp.ones_like(m), out.reshape(*rows, -1).astype(jnp.float32))


def output_of(
    plan: LayerPlan, part: PartialAttention, q: QueryBNTH, sinks: Float[Array, " N"] | None
) -> Float[Array, "B N T channels"]:
    """Return the attention of the queries q, whose rows are group-major in `part`: [B, N, T, H] in
    the dtype of q, or fp32 with one more channel if the plan asks for the log-sum-exp."""
    if sinks is not None:
        logits = sinks.astype(jnp.float32).reshape(1, part.o.shape[1], -1, 1)
        part = online_softmax.with_sinks(part, jnp.repeat(logits, q.shape[2], axis=2))
    out = online_softmax.normalized(part)
    if not plan.lse:
        return out.astype(q.dtype).reshape(q.shape)
    return jnp.concatenate([out, online_softmax.lse(part)], axis=-1).reshape(*q.shape[:3], -1)


def _add_exact(
    view: View, queries: Queries, rows: Array, part: PartialAttention, first: int | Array
) -> PartialAttention:
    regions, attention, size = view.plan.regions, view.plan.attention, view.keys.shape[2]
    if not size:
        return part
    chunk = min(size, EXACT_CHUNK)

    def step(i: int | Array, part: PartialAttention) -> PartialAttention:
        at, fresh = chunk_at(i, chunk, size)
        k, v = (lax.dynamic_slice_in_dim(a, at, chunk, 2) for a in (view.keys, view.values))
        positions, real = (
            lax.dynamic_slice_in_dim(a, at, chunk, 1)[:, None] for a in (view.positions, view.real)
        )
        seen = (
            (positions <= queries.positions[..., None])
            & inside_window(attention, queries.positions[..., None], positions)
            & outside_body(regions, positions, queries.limits[..., None])
            & real
            & fresh[None, None]
        )
        v = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], v, 0)  # 0 * nan is nan
        scores = attention_logits(attention, dot_rows(rows, k), rows.shape[-1])
        return online_softmax.extend(
            part, scores, _per_row(seen, rows), lambda weights: weigh_rows(weights, v)
        )

    if chunk == size:
        return step(0, part)
    old = regions.sink_slots + regions.ring_slots
    begin: int | Array = 0
    if attention.window is not None:
        # a query that reaches no new token before `reached` reaches no older one either
        reached = jnp.asarray(first, jnp.int32) - attention.window + 1
        begin = jnp.where(reached > 0, (old + reached) // chunk, 0)
    end = jnp.minimum(old + first + queries.positions.shape[1], size)
    return lax.fori_loop(begin, -(-end // chunk), step, part)


def read_chunks(
    view: View, queries: Queries, rows: Float[Array, "B K R H"], part: PartialAttention
) -> PartialAttention:
    """Return `part` with the body added: dequantize and use one chunk after the other."""
    plan, regions, (k_params, v_params) = view.plan, view.plan.regions, view.params
    k_home, v_home = 0, len(plan.codecs) - 1
    size = regions.read_capacity
    if not size:
        return part
    chunk = chunk_tokens(regions.block, size, rows, plan.row_width)
    query = plan.k.query(k_params, view.stats[k_home], rows)

    def step(i: Array, part: PartialAttention) -> PartialAttention:
        at, fresh = chunk_at(i, chunk, size)
        index = regions.tokens_at(at + jnp.arange(chunk, dtype=jnp.int32), view.written)
        positions = regions.sink + jnp.maximum(index, 0)
        positions = jnp.broadcast_to(positions, (rows.shape[0], chunk))

        def read(home: int, at: Array) -> Tree:
            specs = plan.readable_specs(home, 1, 1, regions.block)
            return load_chunk(specs, view.body[home], at // regions.block, chunk // regions.block)

        def weigh(weights: Float[Array, "B K R C"]) -> Float[Array, "B K R H"]:
            # joint rows are dequantized once, for keys and values
            then = at if plan.joint else _after(weights, at)
            stored = read(v_home, then)
            if plan.v.facts.stores_rows:  # 0 * nan is nan; codes decode to finite rows
                stored = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], stored, 0)
            return plan.v.weighted(
                v_params, view.stats[v_home], weights, stored, positions, view.rope
            )

        scores = plan.k.scores(
            k_params, view.stats[k_home], query, read(k_home, at), positions, view.rope
        )
        seen = (
            (index[:, None] < queries.limits[..., None])
            & inside_window(plan.attention, queries.positions[..., None], positions[:, None])
            & fresh[None, None]
        )
        if regions.wraps:
            seen &= index[:, None] >= 0
        logits = attention_logits(plan.attention, scores, rows.shape[-1])
        return online_softmax.extend(part, logits, _per_row(seen, rows), weigh)

    end = jnp.max(regions.held(queries.limits))
    if regions.wraps:
        end = jnp.minimum(end, size)
    return lax.fori_loop(0, -(-end // chunk), step, part)


def _after(weights: Float[Array, "B K R C"], at: Array) -> Array:
    """Return `at`, made to depend on the weights. They are never negative, but XLA does not know
    it.

    Otherwise the CPU backend unpacks a chunk of V while the chunk of K is still in memory: 60 %
    more memory, 10 to 15 % more time (docs/decisions/streaming_attention.md).
    """
    return at + (weights[0, 0, 0, 0] < 0).astype(at.dtype)


def _per_row(mask: Bool[Array, "B T C"], rows: Float[Array, "B K R H"]) -> Bool[Array, "B 1 R C"]:
    """Repeat a mask over tokens T for the group-major query rows R = G * T."""
    return jnp.tile(mask, (1, rows.shape[2] // mask.shape[1], 1))[:, None]


def chunk_at(i: Array | int, chunk: int, size: int) -> tuple[Array, Bool[Array, " chunk"]]:
    """Return the start of step i and a mask of the entries that no earlier step has read. The last
    step starts early, to stay in the array."""
    at = jnp.minimum(jnp.asarray(i, jnp.int32) * chunk, size - chunk)
    return at, at + jnp.arange(chunk, dtype=jnp.int32) >= jnp.asarray(i, jnp.int32) * chunk
