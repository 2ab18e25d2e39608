"""A value that is not finite counts for the queries that see its token, and for nothing else: a
masked token has weight 0, but 0 * inf is nan."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.attention import dispatch
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.kvq_jax import windowed_runs
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    ROUNDING,
    Sequences,
    agrees,
    attend_reference,
    decode,
    decode_natively,
    empty,
    parameters_of,
    prefill,
    sequences,
)

BATCH = 8
needs_native = pytest.mark.skipif(bool(dispatch.no_device("native")), reason="no CPU kernels")
each_route = pytest.mark.parametrize(
    "step", [decode, pytest.param(decode_natively, marks=needs_native)], ids=("xla", "native")
)


def spoiled(token: int) -> Sequences:
    """Return sequences with an infinite value in each row."""
    v = np.array(sequences().v)
    v[:, 0, token, 3] = np.inf
    return dataclasses.replace(sequences(), v=v)


def prompted(plan: LayerPlan, state: LayerState, tokens: Sequences, length: int) -> LayerState:
    inputs = tokens.window(np.zeros(BATCH, np.int32), np.full(BATCH, length), length)
    return prefill(plan, parameters_of(plan), state, inputs, ())[1]


def next_token(
    step: Callable, plan: LayerPlan, state: LayerState, tokens: Sequences, length: int
) -> tuple[np.ndarray, LayerState]:
    """Decode token `length` of each row, after as many."""
    inputs = tokens.window(np.full(BATCH, length), np.full(BATCH, length + 1), 1)
    out, state, _ = step(plan, parameters_of(plan), state, inputs, ())
    return np.asarray(out), state


@each_route
def test_a_token_in_the_body_is_not_read_from_the_ring_too(step: Callable):
    plan, state = empty("kivi:recent=12,block=16,group_size=16")
    aged = plan.regions.recent + plan.regions.block  # the step in which the first block leaves
    tokens = spoiled(5)
    out, after = next_token(step, plan, prompted(plan, state, tokens, aged - 1), tokens, aged - 1)
    assert np.isinf(np.asarray(after.ring[1])).any()
    # the body stores a finite number for it
    inputs = tokens.window(np.full(BATCH, aged - 1), np.full(BATCH, aged), 1)
    seen = jnp.broadcast_to(jnp.arange(CAPACITY) < aged, (BATCH, 1, CAPACITY))
    want = attend_reference(plan, (), after, jnp.full(BATCH, aged), inputs, seen)
    assert agrees(out, np.asarray(want), ROUNDING, np.ones(out.shape[:3], bool))


@each_route
@pytest.mark.parametrize("spec", ["dense", "kivi:recent=12,block=16,group_size=16"])
def test_a_token_before_the_window_is_not_read(step: Callable, spec: str):
    plan, state = windowed_runs.empty(spec, Attention(window=20), slack=CAPACITY)
    outs = {}
    for name, tokens in (("clean", sequences()), ("spoiled", spoiled(44))):
        after = prompted(plan, state, tokens, 70)
        outs[name], _ = next_token(step, plan, after, sequences(), 70)
    np.testing.assert_array_equal(outs["spoiled"], outs["clean"])


@each_route
def test_a_row_that_starts_anew_reads_nothing_of_the_sequence_before(step: Callable):
    plan, state = empty("dense")
    outs = {}
    for name, tokens in (("clean", sequences()), ("spoiled", spoiled(25))):
        after = prompted(plan, prompted(plan, state, tokens, 70), sequences(), 20)
        outs[name], _ = next_token(step, plan, after, sequences(), 20)
    np.testing.assert_array_equal(outs["spoiled"], outs["clean"])
