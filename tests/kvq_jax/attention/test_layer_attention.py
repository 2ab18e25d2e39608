"""A layer with a window, another scale, a soft cap and sinks equals an ordinary layer that is read
with a mask by the reference, over the table of methods. Its body wraps around."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import reference
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    ROUNDING,
    STEP,
    agrees,
    boundary_lengths,
    decode,
    decode_vectors,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
    run,
    sequences,
)
from tests.kvq_jax.windowed_runs import SINKS, SPECIAL, WINDOW, empty, held_codes, tokens_with_sinks
from tests.methods_table import MethodCase, cases

attend_reference = quick_jit(reference.attend, static_argnums=4)


def refuses(case: MethodCase) -> bool:
    return case.spec.startswith("xquant_cl")


def mask_of(positions: np.ndarray, window: int) -> np.ndarray:
    """Return the tokens [B, T, S] that queries at these positions see."""
    tokens = np.arange(CAPACITY)
    return (tokens <= positions[..., None]) & (tokens > positions[..., None] - window)


# rows with statistics, with another layout, with probes, and one that refuses windows
@cases(usual=("kivi2", "innerq2", "xquant4", "zipcache42", "xquant_cl2"))
def test_a_windowed_layer_equals_a_masked_one(case: MethodCase):
    if refuses(case):
        with pytest.raises(ValueError, match="differences of all layers below") as caught:
            empty(case.spec, SPECIAL)
        assert "\n" not in str(caught.value)
        return
    plan, state = empty(case.spec, SPECIAL)
    masked, masked_state = empty(case.spec, Attention())
    # codes may follow the attention (zipcache's probes), and not where they lie
    masked = dataclasses.replace(masked, k=plan.k, v=plan.v)
    tokens, lengths = tokens_with_sinks(), boundary_lengths(plan)
    start = np.maximum(lengths - STEP, 0).astype(np.int32)
    _, prompted = run(plan, state, tokens, lengths, lengths)
    _, masked_prompted = run(masked, masked_state, tokens, lengths, lengths)
    check_codes(plan, prompted, masked, masked_prompted, lengths)
    _, before = run(plan, state, tokens, start // 2, start)
    _, masked_state = run(masked, masked_state, tokens, start // 2, start)
    inputs = tokens.window(start, lengths, STEP)
    out, windowed, _ = decode(plan, parameters_of(plan), before, inputs, ())
    _, after, _ = decode(masked, parameters_of(masked), masked_state, inputs, ())
    check_codes(plan, windowed, masked, after, lengths)
    keys, values = decode_vectors(
        masked, parameters_of(masked), after, jnp.asarray(lengths), inputs.rope
    )
    # the last token of each row, which sees the body as it is now
    last = np.maximum(lengths - start - 1, 0)
    q = jnp.take_along_axis(inputs.q_rot, jnp.asarray(last)[:, None, None, None], 2)
    out = np.take_along_axis(np.asarray(out), last[:, None, None, None], 2)
    rows = np.broadcast_to((lengths > 0)[:, None, None], out.shape[:3])

    def passes(window: int, attention: Attention = SPECIAL, sinks: np.ndarray = SINKS) -> bool:
        mask = mask_of(lengths[:, None] - 1, window)
        want = attend_reference(q, keys, values, mask, attention, jnp.asarray(sinks))
        return agrees(out, np.asarray(want), ROUNDING, rows)

    assert passes(WINDOW)
    assert not passes(WINDOW + 1), "a token too many passes"
    assert not passes(WINDOW - 1), "a token too few passes"
    assert not passes(WINDOW, dataclasses.replace(SPECIAL, soft_cap=None)), "no cap passes"
    assert not passes(WINDOW, dataclasses.replace(SPECIAL, scale=None)), "another scale passes"
    assert not passes(WINDOW, sinks=SINKS - 50), "no sinks pass"
    assert not passes(WINDOW, sinks=SINKS[::-1]), "the sinks of other heads pass"


def check_codes(
    plan: LayerPlan, state: LayerState, masked: LayerPlan, other: LayerState, lengths: np.ndarray
) -> None:
    """Assert that a windowed layer has the codes of an ordinary one, bit for bit, and that one
    block passes for no other."""
    mine, theirs = held_codes(plan, state, lengths), held_codes(masked, other, lengths)
    assert mine.keys() == theirs.keys()
    wrong = [key for key in mine if mine[key].tobytes() != theirs[key].tobytes()]
    assert not wrong, f"{len(wrong)} of {len(mine)}, first {wrong[0]}"
    assert any(mine[a].tobytes() != mine[b].tobytes() for a, b in itertools.pairwise(mine))


@cases("kivi2", "kivi3_k8_pre_rope", usual=("kivi2",))
def test_prompts_longer_than_the_window_equal_masked_ones(case: MethodCase):
    """A prompt on an empty cache, and one that goes on behind it, whose old tokens are read as the
    cache holds them."""
    plan, state = empty(case.spec, SPECIAL)
    masked, masked_state = empty(case.spec, Attention())
    tokens, lengths = tokens_with_sinks(), boundary_lengths(plan)
    held, params = (lengths * 2 // 3).astype(np.int32), parameters_of(plan)
    keys, values = (np.asarray(rows) for rows in (tokens.k_rot, tokens.v))
    for start, stop in ((0 * held, held), (held, lengths)):
        inputs = tokens.window(start, stop, CAPACITY)
        out, state, _ = prefill(plan, params, state, inputs, ())
        real = np.arange(CAPACITY) < (stop - start)[:, None]
        rows = np.broadcast_to(real[:, None], out.shape[:3])
        positions = start[:, None] + np.arange(CAPACITY)
        for window, right in ((WINDOW, True), (WINDOW + 1, False)):
            mask = mask_of(positions, window)
            q = jnp.nan_to_num(inputs.q_rot)
            want = attend_reference(q, keys, values, mask, SPECIAL, jnp.asarray(SINKS))
            assert agrees(out, np.asarray(want), ROUNDING, rows) == right, f"{window=}"
        _, masked_state, _ = prefill(
            masked, params, masked_state, sequences().window(start, stop, CAPACITY), ()
        )
        old = decode_vectors(masked, params, masked_state, jnp.asarray(stop), inputs.rope)
        is_old = (np.arange(CAPACITY) < stop[:, None])[:, None, :, None]
        keys, values = (
            np.where(is_old, np.asarray(mine), theirs)
            for mine, theirs in zip(old, (tokens.k_rot, tokens.v), strict=True)
        )


@cases("kivi2", "kivi3_k8_pre_rope", "xquant4", usual=("kivi2",))
def test_a_windowed_step_of_many_tokens_equals_single_steps(case: MethodCase):
    plan, state = empty(case.spec, SPECIAL, slack=3)  # a step of more tokens is taken in parts
    tokens, lengths = tokens_with_sinks(), boundary_lengths(plan)
    start = np.maximum(lengths - 2 * STEP - 3, 0).astype(np.int32)
    many, _ = run(plan, state, tokens, start, lengths)
    single, _ = run(plan, state, tokens, start, lengths, step=1)
    decoded = np.isfinite(single[:, 0, :, 0])
    assert decoded.sum() == (lengths - start).sum(), "an output is not finite"
    assert row_errors(many, single).max(axis=1)[decoded].max() <= ROUNDING
    assert row_errors(many[::-1], single).max(axis=1)[decoded].max() > ROUNDING


def test_a_window_that_holds_the_whole_cache_is_none():
    for window, kept in ((CAPACITY, None), (CAPACITY - 1, CAPACITY - 1)):
        dims = dataclasses.replace(DIMS, attention=(Attention(window=window),) * 2)
        plan = kvq.cache.layout("kivi:bits=4", dims, 1, CAPACITY).plans[0]
        assert plan.attention.window == kept
        assert plan.regions.sink == (kvq.parse("kivi:bits=4").sink if kept is None else 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 0},
        {"window": 2.5},
        {"window": True},
        {"scale": -1.0},
        {"soft_cap": float("inf")},
        {"scale": float("nan")},
        {"scale": 1e-46},
        {"soft_cap": 1e-46},
        {"sinks": 1},
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_attention_that_means_nothing_is_refused(fields):
    with pytest.raises(ValueError, match=f"attention {next(iter(fields))}="):
        Attention(**fields)


def test_sinks_are_asked_for_and_not_taken_in_vain():
    sinks = jnp.zeros(DIMS.num_attention_heads)
    rows = jnp.zeros((1, 2, 1, 32))
    for has in (True, False):
        dims = dataclasses.replace(DIMS, attention=(Attention(sinks=has),) * 2)
        step = kvq.begin(kvq.init_cache("kivi:bits=4", dims, 1, 64), 1, prefill=False)
        with pytest.raises(ValueError, match=r"sinks are (missing|given)"):
            kvq.append_and_attend(
                step, jnp.zeros((1, 4, 1, 32)), rows, rows, sinks=None if has else sinks
            )
        out, _ = kvq.append_and_attend(
            step, jnp.zeros((1, 4, 1, 32)), rows, rows + 2, sinks=sinks if has else None
        )
        # a score of 0 beside a sink of 0: half of the weight has no value
        np.testing.assert_allclose(out, 1.0 if has else 2.0, rtol=1e-5)


def test_the_dimensions_of_a_cache_keep_its_attention():
    dims = dataclasses.replace(DIMS, attention=(SPECIAL, Attention()))
    assert kvq.CacheDims.from_json(dims.to_json()) == dims
    assert '"attention"' not in DIMS.to_json()
    with pytest.raises(ValueError, match="3 entries for 2 layers"):
        kvq.init_cache("kivi", dataclasses.replace(dims, attention=(SPECIAL,) * 3), 1, 64)
    assert [p.attention for p in kvq.init_cache("kivi", dims, 1, 64).plans] == [
        SPECIAL,
        Attention(),
    ]
