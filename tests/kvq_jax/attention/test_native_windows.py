"""Native kernels read layers with windows, soft caps, another scale and sinks as XLA does, over the
methods that they serve."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import NATIVE
from kvq_jax.cache.update import prefill_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    ROUNDING,
    STEP,
    agrees,
    boundary_lengths,
    decode,
    decode_natively,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
    run,
)
from tests.kvq_jax.windowed_runs import SPECIAL, WINDOW, empty, tokens_with_sinks, windowed_plan
from tests.methods_table import METHOD_CASES, MethodCase, cases

if reason := dispatch.no_device("native"):
    pytest.skip(reason, allow_module_level=True)


def served(case: MethodCase) -> bool:
    if case.spec.startswith(("zipcache", "xquant_cl")):  # windows are refused
        return False
    return (
        dispatch.unsupported(windowed_plan(case.spec), DIMS.num_attention_heads, 1, "native")
        is None
    )


SERVED = [case for case in METHOD_CASES if served(case)]
each = pytest.mark.parametrize(
    "case",
    some(SERVED, [case for case in SERVED if case.id in ("kivi2", "kivi3_k8_pre_rope")]),
    ids=lambda case: case.id,
)
prefill_natively = quick_jit(functools.partial(prefill_layer, route=NATIVE), static_argnums=0)


def polluted(plan: LayerPlan, state: LayerState, lengths: np.ndarray) -> LayerState:
    """Return the state with NaN as every float of the slots in which no token of a window lies."""
    regions = plan.regions
    slot = np.arange(regions.block_slots + 1)
    written = np.asarray(regions.aged_tokens(jnp.asarray(lengths)))[:, None] // regions.block
    block = written - 1 - (written - 1 - slot) % regions.block_slots
    reached = (block + 1) * regions.block > lengths[:, None] + 1 - WINDOW
    live = (block >= 0) & reached & (slot < regions.block_slots)

    def spoil(spec, array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating):
            return array
        mask = np.repeat(live, spec["tokens"].size, axis=1)
        shape = [1] * array.ndim
        shape[0], shape[spec.axis("tokens")] = mask.shape
        junk = spec.store(jnp.full_like(spec.load(array), np.nan))
        return jnp.where(mask.reshape(shape), array, junk)

    bodies = tuple(
        jax.tree.map(spoil, codec.body(1, 1, regions.block), body)
        for codec, body in zip(plan.codecs, state.body, strict=True)
    )
    return dataclasses.replace(state, body=bodies)


@each
@pytest.mark.parametrize("count", [1, STEP])
def test_a_windowed_layer_is_read_as_xla_reads_it(case: MethodCase, count: int):
    plan, state = empty(case.spec, SPECIAL)
    tokens, lengths = tokens_with_sinks(), boundary_lengths(plan)
    start = np.maximum(lengths - count, 0).astype(np.int32)
    _, before = run(plan, state, tokens, start // 2, start)
    inputs, params = tokens.window(start, lengths, count), parameters_of(plan)
    want, after, _ = decode(plan, params, before, inputs, ())
    if count == 1:
        before = polluted(plan, before, start)
        _, after, _ = decode(plan, params, before, inputs, ())
    out, native_after, _ = decode_natively(plan, params, before, inputs, ())
    chex.assert_trees_all_equal(native_after, after)
    real = np.broadcast_to(np.asarray(inputs.valid)[:, None], want.shape[:3])
    worst = row_errors(out, np.asarray(want))[real].max()
    assert worst <= ROUNDING, f"worst relative error {worst:.1e}"
    for field, other in (("window", WINDOW - 1), ("soft_cap", 8.0), ("scale", None)):
        attention = dataclasses.replace(SPECIAL, **{field: other})
        wrong = dataclasses.replace(plan, attention=attention)
        if case is SERVED[1] and count == 1:  # a negative control compiles each
            found, *_ = decode_natively(wrong, params, before, inputs, ())
            assert not agrees(found, np.asarray(want), ROUNDING, real), f"{field}={other} passes"


@cases("kivi2", "kivi3_k8_pre_rope", "xquant4", usual=("kivi2", "kivi3_k8_pre_rope"))
@pytest.mark.parametrize("slack", [STEP, 10 * CAPACITY])
def test_prompts_are_read_as_xla_reads_them(case: MethodCase, slack: int):
    """A prompt on an empty cache, and one that goes on behind it. The body wraps around, or not."""
    plan, state = empty(case.spec, SPECIAL, slack=slack)
    tokens, lengths, params = tokens_with_sinks(), boundary_lengths(plan), parameters_of(plan)
    held = (lengths * 2 // 3).astype(np.int32)
    for start, stop in ((0 * held, held), (held, lengths)):
        inputs = tokens.window(start, stop, CAPACITY)
        want, after, _ = prefill(plan, params, state, inputs, ())
        out, _, _ = prefill_natively(plan, params, state, inputs, ())
        real = np.broadcast_to(np.asarray(inputs.valid)[:, None], want.shape[:3])
        worst = row_errors(out, np.asarray(want))[real].max()
        assert worst <= ROUNDING, f"worst relative error {worst:.1e}"
        state = after
    assert not agrees(np.asarray(out)[::-1], np.asarray(want), ROUNDING, real), "other rows pass"
