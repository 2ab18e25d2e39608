"""The C++ kernel against the reference on the same codes, for every method that it serves, and what
it may never read."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.cache.update import decode_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    STEP,
    agrees,
    attend_reference,
    boundary_lengths,
    decode,
    decode_natively,
    empty,
    parameters_of,
    row_errors,
    run,
    sequences,
)
from tests.methods_table import METHOD_CASES, ONE_OF_EACH, MethodCase, cases

if reason := dispatch.no_device("native"):
    pytest.skip(reason, allow_module_level=True)

SERVED = [
    case
    for case in METHOD_CASES
    if dispatch.unsupported(
        kvq.cache.layout(case.spec, DIMS, 1, CAPACITY, "float32").plans[-1], 4, 1, "native"
    )
    is None
]
# tests/cpu_kernels reads every layout
each = pytest.mark.parametrize(
    "case",
    # and rows that are rotated alone, as no kernel adds a bias
    some(SERVED, [c for c in SERVED if c in ONE_OF_EACH or c.id == "int4_rotated"]),
    ids=lambda case: case.id,
)


def polluted(plan: LayerPlan, state: LayerState, live: np.ndarray) -> LayerState:
    """The same state with NaN as every float, and other codes, behind the first live[b] tokens of
    the bodies."""

    def spoil(spec, array: jax.Array) -> jax.Array:
        axis = spec.axis("tokens")
        entries = spec.along("tokens", jnp.arange(array.shape[axis]))
        ends = spec.along(
            "batch", jnp.asarray(-(-live * spec["tokens"].size // plan.regions.block))
        )
        junk = (
            spec.store(jnp.full_like(spec.load(array), np.nan))
            if jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating)
            else ~array
        )
        return jnp.where(entries < ends, array, junk)

    bodies = tuple(
        jax.tree.map(spoil, codec.body(1, 1, plan.regions.block), body)
        for codec, body in zip(plan.codecs, state.body, strict=True)
    )
    return dataclasses.replace(state, body=bodies)


def before_the_last(
    plan: LayerPlan, state: LayerState, lengths: np.ndarray, new: int
) -> tuple[np.ndarray, LayerState]:
    start = np.maximum(lengths - new, 0).astype(np.int32)
    return start, run(plan, state, sequences(), start, start)[1]


def test_the_table_has_methods_of_every_kind_that_kernels_serve():
    assert {"kivi2", "innerq2", "innerq3_sym", "mixed", "int4", "nf4_two_heads"} <= {
        case.id for case in SERVED
    }


@each
def test_the_kernels_attend_as_the_reference_does_and_write_the_same_state(case: MethodCase):
    plan, state = empty(case.spec)
    lengths, tokens = boundary_lengths(plan), sequences()
    start, before = before_the_last(plan, state, lengths, 1)
    inputs = tokens.window(start, lengths, 1)
    spoiled = polluted(plan, before, np.asarray(plan.regions.aged_tokens(jnp.asarray(start))))
    out, after, _ = decode_natively(plan, parameters_of(plan), spoiled, inputs, ())
    _, clean, _ = decode(plan, parameters_of(plan), before, inputs, ())
    chex.assert_trees_all_equal(after, decode(plan, parameters_of(plan), spoiled, inputs, ())[1])
    out = np.asarray(out, np.float32)

    def expected(lengths: np.ndarray) -> np.ndarray:
        mask = np.arange(plan.regions.capacity)[None, None] < lengths[:, None, None]
        return np.asarray(
            attend_reference(
                plan,
                parameters_of(plan),
                clean,
                jnp.asarray(lengths),
                inputs,
                jnp.asarray(mask),
                (),
            )
        )

    want, rows = expected(lengths), np.broadcast_to((lengths > 0)[:, None, None], out.shape[:3])
    assert agrees(out, want, 1e-5, rows), (
        f"worst relative error {row_errors(out, want)[rows].max():.1e}"
    )
    long = np.broadcast_to((lengths == plan.regions.capacity - 1)[:, None, None], out.shape[:3])
    for others, seen in (("one token too many", 1), ("one token too few", -1)):
        assert not agrees(expected(lengths + seen), want, 1e-5, long), f"{others} passes"
    assert not agrees(out[:, ::-1], want, 1e-5, long), "the heads in another order pass"


@each
def test_a_decode_step_reads_the_windows_in_the_kernel(case: MethodCase):
    """Also windows of keys before RoPE, and those beside a body whose sums a codec turns back: XLA
    took twice the time of the kernel for 1,000 tokens."""
    plan, state = empty(case.spec)
    lengths = np.maximum(boundary_lengths(plan), 1)
    inputs = sequences().window(lengths - 1, lengths, 1)

    def reads_windows(route: dispatch.Route) -> list[bool]:
        lowered = jax.jit(functools.partial(decode_layer, route=route), static_argnums=0).lower(
            plan, parameters_of(plan), state, inputs, ()
        )
        calls = lowered.as_text().split("@kvq_decode_attention")[1:]
        return ["windows = true" in call.partition("\n")[0] for call in calls]

    turned_back = plan.v.kernels.sum is not None
    assert reads_windows(dispatch.NATIVE) == [False] * turned_back + [True]
    assert reads_windows(dispatch.XLA) == [], "no kernel runs"


@cases("kivi2", "kvquant4", "waterfill_eigen", "values_only", usual=("kivi2", "kvquant4"))
def test_the_kernel_takes_several_new_tokens_as_xla_does(case: MethodCase):
    plan, state = empty(case.spec)
    lengths, tokens = np.maximum(boundary_lengths(plan), STEP), sequences()
    start, before = before_the_last(plan, state, lengths, STEP)
    inputs = tokens.window(start, lengths, STEP)
    out, _, _ = decode_natively(plan, parameters_of(plan), before, inputs, ())
    want, _, _ = decode(plan, parameters_of(plan), before, inputs, ())
    error = row_errors(np.asarray(out, np.float32), np.asarray(want, np.float32))
    assert error.max() <= 1e-5, f"worst relative error {error.max():.1e}"
    assert row_errors(np.asarray(out)[:, :, 1:], np.asarray(want)[:, :, :-1]).max() > 0.01, (
        "the token before passes"
    )
