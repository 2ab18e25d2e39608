"""Streaming attention against the reference on the same codes, with checks that the comparison can
fail."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvq_jax.attention import reference
from kvq_jax.cache.cache import CacheDims
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import (
    Sequences,
    agrees,
    attend_reference,
    boundary_lengths,
    decode,
    decode_vectors,
    empty,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
    run,
    sequences,
)
from tests.methods_table import METHOD_CASES, ONE_OF_EACH_LAYER, MethodCase, cases

exact_attention = quick_jit(reference.attend)


def last_step(plan: LayerPlan, state: LayerState, tokens: Sequences, lengths: np.ndarray):
    """Decode one token on each row of `lengths - 1` tokens and return (output, state after, its
    inputs)."""
    start = np.maximum(lengths - 1, 0).astype(np.int32)
    _, before = run(plan, state, tokens, start, start)
    inputs = tokens.window(start, lengths, 1)
    out, after, _ = decode(plan, parameters_of(plan), before, inputs, tokens.below(plan))
    return np.asarray(out, np.float32), after, inputs


def expected(
    plan: LayerPlan,
    state: LayerState,
    lengths: np.ndarray,
    inputs,
    seen: int = 0,
    carry: Any = None,
) -> np.ndarray:
    """Return the reference for queries at the last token of each row; `seen` shifts how many tokens
    they see."""
    carry = sequences().below(plan) if carry is None else carry
    mask = np.arange(plan.regions.capacity)[None, None] < (lengths + seen)[:, None, None]
    return np.asarray(
        attend_reference(
            plan, parameters_of(plan), state, jnp.asarray(lengths), inputs, jnp.asarray(mask), carry
        ),
        np.float32,
    )


def shifted(plan: LayerPlan, state: LayerState, side: int) -> LayerState:
    """The state with every floating-point array of one body moved on by one entry of its token
    axis: scales of the wrong group. A body that is nothing but codes has its codes moved."""
    leaves = plan.codecs[side].body(1, 1, plan.regions.block)
    floats = [
        jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating) for leaf in jax.tree.leaves(leaves)
    ]

    def roll(leaf, array):
        moves = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating) or not any(floats)
        return jnp.roll(array, 1, leaf.axis("tokens")) if moves else array

    body = list(state.body)
    body[side] = jax.tree.map(roll, leaves, body[side])
    return dataclasses.replace(state, body=tuple(body))


@cases()
def test_decode_equals_the_reference_on_the_same_codes(case: MethodCase):
    plan, state = empty(case.spec)
    lengths = boundary_lengths(plan)
    out, after, inputs = last_step(plan, state, sequences(), lengths)
    want = expected(plan, after, lengths, inputs)
    rows = np.broadcast_to((lengths > 0)[:, None, None], out.shape[:3])
    assert agrees(out, want, 1e-5, rows), (
        f"worst relative error {row_errors(out, want)[rows].max():.1e}"
    )

    def others(rows):
        return rows[::-1] if len(rows) > 1 else tuple(r[..., ::-1] for r in rows)

    swapped = dataclasses.replace(after, sink=others(after.sink), ring=others(after.ring))
    long = np.broadcast_to((lengths == plan.regions.capacity - 1)[:, None, None], out.shape[:3])
    assert not agrees(expected(plan, swapped, lengths, inputs), want, 1e-5, long), (
        "windows of V for those of K pass"
    )
    assert not agrees(np.zeros_like(out), want, 1e-5, long), "zeros pass"
    for side in range(len(plan.codecs)):
        assert not agrees(
            expected(plan, shifted(plan, after, side), lengths, inputs), want, 1e-5, long
        ), f"scales of another group pass, {side=}"
    assert not agrees(expected(plan, after, lengths, inputs, seen=1), want, 1e-5, long), (
        "one token too many passes"
    )
    assert not agrees(expected(plan, after, lengths, inputs, seen=-1), want, 1e-5, long), (
        "one token too few passes"
    )


@cases()
def test_prefill_is_exact_inside_the_prompt_and_reads_what_was_cached_before(case: MethodCase):
    plan, state = empty(case.spec)
    capacity, tokens, params = plan.regions.capacity, sequences(), parameters_of(plan)
    zero, lengths = np.zeros(8, np.int32), boundary_lengths(plan)
    below, causal = tokens.below(plan), np.tril(np.ones((8, capacity, capacity), bool))
    first, _, _ = prefill(plan, params, state, tokens.window(zero, lengths, capacity), below)
    exact = exact_attention(tokens.q, tokens.k_rot, tokens.v, causal)
    rows = np.broadcast_to((np.arange(capacity) < lengths[:, None])[:, None], exact.shape[:3])
    assert agrees(np.asarray(first), np.asarray(exact), 1e-5, rows), (
        f"worst relative error {row_errors(first, exact)[rows].max():.1e}"
    )

    # a second part of the prompt after a full body: its own tokens are exact, the others as cached
    start, stop = np.full(8, capacity - 20, np.int32), np.full(8, capacity, np.int32)
    _, before = run(plan, state, tokens, start, start)
    out, _, _ = prefill(plan, params, before, tokens.window(start, stop, capacity), below)
    old = decode_vectors(plan, params, before, jnp.asarray(start), tokens.rope, below)
    is_old = (np.arange(capacity) < capacity - 20)[:, None]
    k, v = (
        np.where(is_old, cached, own)
        for cached, own in zip(old, (tokens.k_rot, tokens.v), strict=True)
    )
    want = exact_attention(tokens.q[:, :, -1:], k, v, causal[:, -1:])
    error = row_errors(np.asarray(out)[:, :, 19:20], want).max()
    assert error <= 1e-5, f"relative error {error:.1e}"
    shifted_values = exact_attention(tokens.q[:, :, -1:], k, np.roll(v, 1, axis=2), causal[:, -1:])
    assert row_errors(shifted_values, want).max() > 1e-2, "values of other tokens would pass"


# (method, KV heads, query heads per KV head, head dim, dtype): every pair of values of two columns
# meets where they can
SHAPES = (
    ("kivi2", 1, 1, 8, "float32"),
    ("innerq2", 2, 7, 8, "bfloat16"),
    ("innerq2", 1, 1, 64, "float32"),
    ("kivi4_group8", 1, 7, 80, "float32"),
    ("mixed", 2, 1, 80, "bfloat16"),
    ("innerq2", 1, 4, 128, "bfloat16"),
    ("dense", 2, 7, 64, "bfloat16"),
)


@pytest.mark.parametrize(
    ("name", "kv_heads", "group", "head_dim", "dtype"),
    some(SHAPES, (*SHAPES[:2], SHAPES[3], SHAPES[5])),
)
def test_decode_equals_the_reference_for_every_head_shape(
    name: str, kv_heads: int, group: int, head_dim: int, dtype: str
):
    dims = CacheDims(1, kv_heads * group, kv_heads, head_dim, kv_heads * group * head_dim)
    spec = next(case.spec for case in METHOD_CASES if case.id == name)
    plan, state = empty(spec, batch=2, dims=dims, dtype=dtype)
    lengths = np.array([plan.regions.capacity, 37], np.int32)
    tokens = sequences(2, dims, plan.regions.capacity, dtype=dtype)
    out = None
    for start in range(
        0, plan.regions.capacity, 45
    ):  # no prefill to compile: the cache is filled by steps
        at = np.minimum(start, lengths).astype(np.int32)
        out_now, state, _ = decode(
            plan, parameters_of(plan), state, tokens.window(at, lengths, 45), tokens.below(plan)
        )
        out = (
            np.asarray(out_now, np.float32)
            if out is None
            else np.where(lengths[:, None, None, None] > start, out_now, out)
        )
    last = np.stack([out[b][:, (lengths[b] - 1) % 45] for b in range(2)])[:, :, None]
    want = expected(plan, state, lengths, tokens.window(lengths - 1, lengths, 1))
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    everything = np.ones(last.shape[:3], bool)
    assert agrees(last, want, tolerance, everything), (
        f"worst relative error {row_errors(last, want).max():.1e}"
    )
    assert not agrees(np.zeros_like(last), want, tolerance, everything), "zeros pass"
    wrong = expected(plan, shifted(plan, state, 0), lengths, tokens.window(lengths - 1, lengths, 1))
    assert not agrees(wrong, want, tolerance, everything), "scales of another group pass"


@cases(usual=(*ONE_OF_EACH_LAYER, "pq_tables", "waterfill"))
def test_finite_garbage_in_unused_capacity_changes_nothing(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    rng = np.random.default_rng(5)

    def garbage(leaf):
        if leaf.dtype == jnp.uint16:  # the bits of a bfloat16
            return lax.bitcast_convert_type(
                jnp.asarray(1e4 * rng.normal(size=leaf.shape), jnp.bfloat16), jnp.uint16
            )
        if leaf.dtype == jnp.int32:  # the bits of a float32, or of signs
            return lax.bitcast_convert_type(
                jnp.asarray(1e4 * rng.normal(size=leaf.shape), jnp.float32), jnp.int32
            )
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(-(2**15), 2**15, leaf.shape), leaf.dtype)
        return jnp.asarray(1e4 * rng.normal(size=leaf.shape), leaf.dtype)

    dirty = dataclasses.replace(jax.tree.map(garbage, state), stats=state.stats)
    prompt = (lengths // 2).astype(np.int32)
    clean_out, _ = run(plan, state, tokens, prompt, lengths)
    dirty_out, _ = run(plan, dirty, tokens, prompt, lengths)
    np.testing.assert_array_equal(clean_out, dirty_out)
