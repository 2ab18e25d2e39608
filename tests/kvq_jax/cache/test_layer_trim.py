"""The rows of one layer's cache are shortened as those of a cache of all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from tests.kvq_jax.cache.test_layer_cache import (
    REAL,
    SPEC,
    TOKENS,
    plan_of,
    prompted,
    rows,
    tokens_first,
)
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    ROUNDING,
    beyond_rounding,
    live,
    parameters_of,
    row_errors,
)
from tests.methods_table import METHOD_CASES, MethodCase, cases


@cases(*(case.id for case in METHOD_CASES), usual=("kivi2", "innerq2", "kvquant4"))
def test_a_plan_trims_as_a_cache_of_all_layers(case: MethodCase):
    if "xquant_cl" in case.spec:
        pytest.skip("a method that builds on the layer below is refused")
    plan, one = plan_of(case.spec), kvq.CacheDims(1, 4, 2, 32, 128)
    parameters, arrays = parameters_of(plan.layer), rows(0, TOKENS, REAL)
    options = dict(prefill=True, parameters=parameters, lengths=REAL, layout="BNTH")
    _, cache = plan.attend(plan.init(2), **arrays, **options)
    whole = kvq.init_cache(case.spec, one, 2, CAPACITY, "float32")
    step = kvq.begin(whole, TOKENS, jnp.array(REAL), prefill=True, parameters=[parameters])
    whole = kvq.finish(kvq.append_and_attend(step, **arrays)[1])
    kept = np.array([15, 30])
    expected = kvq.rows.trim(whole, kept, (parameters,))
    found = jax.jit(plan.trim)(cache, kept, parameters)
    assert found.lengths.tolist() == expected.lengths.tolist() == [15, 27]
    state = live(plan.layer, expected.layers[0], found.lengths)
    assert not beyond_rounding(live(plan.layer, found.state, found.lengths), state)
    assert beyond_rounding(live(plan.layer, cache.state, found.lengths), state), "none is trimmed"


def test_tokens_that_are_taken_back_leave_no_trace():
    """Speculative decoding: drafts are attended to, and the rejected ones trimmed."""
    plan = plan_of(SPEC)
    before = prompted(plan, 0)
    token = tokens_first(rows(TOKENS, 1, [1, 1]))
    drafts, real = tokens_first(rows(TOKENS, 5, [5, 5], seed=3)), [1, 5]  # no block leaves for them
    names = ("q", "k", "v")
    _, after = plan.attend(before, *(drafts[n] for n in names), lengths=real, prefill=False)
    assert after.lengths.tolist() == [41, 32]
    back = plan.trim(after, before.lengths)
    assert back.lengths.tolist() == before.lengths.tolist()
    out, cache = plan.attend(back, *(token[n] for n in names), prefill=False)
    wanted, expected = plan.attend(before, *(token[n] for n in names), prefill=False)
    kept = np.asarray(expected.lengths)
    assert row_errors(out, wanted).max() <= ROUNDING
    assert not beyond_rounding(
        live(plan.layer, cache.state, kept), live(plan.layer, expected.state, kept)
    )
    kept_drafts, _ = plan.attend(after, *(token[n] for n in names), prefill=False)
    assert row_errors(kept_drafts, wanted).max() > 1e-2, "the drafts would pass"


def test_a_window_that_has_moved_on_is_not_trimmed_back():
    asked = dict(layer=0, capacity=256, attention=kvq.Attention(window=8))
    local = kvq.layer_plan("kivi:recent=8,block=16,group_size=16", DIMS, **asked)
    cache = local.append(local.init(1), *[jnp.ones((1, 200, 2, 32))] * 2)
    with pytest.raises(ValueError, match="a layer with a window of 8 tokens can go back to"):
        local.trim(cache, [1])
    assert local.trim(cache, [190]).lengths.tolist() == [190]
