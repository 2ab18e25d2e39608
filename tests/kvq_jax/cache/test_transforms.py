"""Layers under vmap, and compiled as users compile them. (test_step.py scans whole steps.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.attention.dispatch import XLA
from kvq_jax.cache.update import decode_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.compile_options import USUAL_COMPILE
from tests.kvq_jax.layer_runs import (
    STEP,
    automatic,
    beyond_rounding,
    decode,
    empty,
    live,
    parameters_of,
    quick_jit,
    row_errors,
    run,
    sequences,
    with_small_chunks,
)
from tests.methods_table import MethodCase, cases


def assert_same_state(
    plan: LayerPlan,
    found: LayerState,
    expected: LayerState,
    before: LayerState,
    lengths: np.ndarray,
) -> None:
    """To rounding, for tokens that live: two compiled functions made the states. The state before
    the step must be told apart."""
    found_live, expected_live, old = (
        live(plan, state, lengths) for state in (found, expected, before)
    )
    assert not beyond_rounding(found_live, expected_live)
    assert beyond_rounding(found_live, old), "a step that writes nothing would pass"


@cases("innerq2")
def test_a_step_compiled_as_for_users_equals_that_of_the_tests(case: MethodCase):
    plan, state = empty(case.spec)
    start = np.array([0, 1, 12, 23, 27, 28, 60, 82], np.int32)
    _, state = run(plan, state, sequences(), start, start)
    inputs = sequences(seed=4).window(start, start + STEP, STEP)
    step = functools.partial(decode_layer, route=XLA)
    optimized = jax.jit(with_small_chunks(step), static_argnums=0, compiler_options=USUAL_COMPILE)
    out, after, _ = optimized(plan, parameters_of(plan), state, inputs, ())
    quick_out, quick_after, _ = decode(plan, parameters_of(plan), state, inputs, ())
    assert_same_state(plan, after, quick_after, state, start + STEP)
    assert row_errors(np.asarray(out), np.asarray(quick_out)).max() <= 1e-5
    assert row_errors(np.asarray(out)[::-1], np.asarray(quick_out)).max() > 1e-2, (
        "other rows' outputs would pass"
    )


def test_vmap_over_caches_equals_each_cache():
    plan, state = empty("kivi:sink=2,recent=5,block=8", batch=2)
    start = np.array([20, 31], np.int32)
    states, inputs = [], []
    for seed in (0, 1):
        tokens = sequences(2, seed=seed)
        states.append(run(plan, state, tokens, start, start)[1])
        inputs.append(tokens.window(start, start + 1, 1))
    single = [
        decode(plan, parameters_of(plan), s, i, ()) for s, i in zip(states, inputs, strict=True)
    ]
    stack = functools.partial(jax.tree.map, lambda *a: jnp.stack(a))
    out, after, _ = quick_jit(
        jax.vmap(
            functools.partial(decode_layer, plan, (), route=automatic(plan)), in_axes=(0, 0, None)
        )
    )(stack(*states), stack(*inputs), ())
    for i, (one_out, one_after, _) in enumerate(single):
        assert_same_state(
            plan, jax.tree.map(lambda a, i=i: a[i], after), one_after, states[i], start + 1
        )
        assert row_errors(np.asarray(out)[i], np.asarray(one_out)).max() <= 1e-5, f"cache {i}"
