"""The laws of a cache layer, over the whole table of methods: what a token's cached form may depend
on, and what it may not."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.kvq_jax.layer_runs import (
    ROUNDING,
    STEP,
    beyond_rounding,
    boundary_lengths,
    decode,
    decode_rows,
    differences,
    empty,
    live,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
    run,
    sequences,
)
from tests.methods_table import MethodCase, cases


def prompts_of(lengths: np.ndarray) -> np.ndarray:
    """Half of every row, and enough that its prompt statistics are those of the whole (see
    `sequences`)."""
    return np.maximum(lengths // 2, np.minimum(lengths, 5)).astype(np.int32)


@cases()
def test_prefill_then_decode_equals_longer_prefill(case: MethodCase):
    """Where the prompt fixes statistics, the shorter one is given those of the longer."""
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    _, whole = run(plan, state, tokens, lengths, lengths)
    _, split = run(plan, state, tokens, prompts_of(lengths), lengths, stats=whole.stats)
    first, second = live(plan, whole, lengths), live(plan, split, lengths)
    if not case.same_codes_in_decode:
        first, second = (
            {k: v for k, v in d.items() if not k.startswith("body")} for d in (first, second)
        )
    assert not beyond_rounding(first, second)
    changed = dataclasses.replace(
        tokens, v=tokens.v + (np.arange(tokens.v.shape[2]) == 20)[:, None].astype(np.float32)
    )
    _, other = run(plan, state, changed, lengths, lengths)
    found = beyond_rounding(live(plan, whole, lengths), live(plan, other, lengths))
    assert found, "a changed value row goes unnoticed"
    assert plan.joint or not any(".k" in name for name in found), (
        f"a changed value row changed keys: {found}"
    )


@cases()
def test_a_step_of_many_tokens_equals_single_steps(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    start = np.maximum(lengths - 2 * STEP - 3, 0).astype(np.int32)  # the last call is not full
    many, after_many = run(plan, state, tokens, start, lengths)
    single, after_single = run(plan, state, tokens, start, lengths, step=1)
    assert not beyond_rounding(live(plan, after_many, lengths), live(plan, after_single, lengths))
    decoded = np.isfinite(single[:, 0, :, 0])
    assert decoded.sum() == (lengths - start).sum(), "an output is not finite"
    errors = row_errors(many, single).max(axis=1)[decoded]
    assert errors.max() <= ROUNDING, f"worst relative error {errors.max():.1e}"


@cases()
def test_a_row_has_the_same_codes_and_outputs_whatever_the_other_rows_hold(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    mine = np.arange(8) % 2 == 0
    loud = np.where(mine, 1, 1e4).astype(np.float32)[:, None, None, None]
    crowd = {f: loud * getattr(tokens, f) for f in ("q", "k_pre", "k_rot", "v")}
    crowd = dataclasses.replace(tokens, **crowd)
    crowd_lengths = np.where(mine, lengths, lengths[::-1]).astype(np.int32)
    prompts, crowd_prompts = prompts_of(lengths), prompts_of(crowd_lengths)
    out, ours = run(plan, state, tokens, prompts, lengths)
    crowd_out, theirs = run(plan, state, crowd, crowd_prompts, crowd_lengths)
    one, other = (
        {name: a[mine] for name, a in live(plan, s, n).items()}
        for s, n in ((ours, lengths), (theirs, crowd_lengths))
    )
    assert not differences(one, other)
    np.testing.assert_array_equal(out[mine], crowd_out[mine])


@cases("innerq2")
def test_a_prompt_has_the_same_codes_in_a_batch_of_one(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    _, batch = run(plan, state, tokens, lengths, lengths)
    for row in (4, 7):
        single, one = empty(case.spec, batch=1)
        _, alone = run(single, one, tokens.rows([row]), lengths[[row]], lengths[[row]])
        in_batch = {name: a[[row]] for name, a in live(plan, batch, lengths).items()}
        assert not beyond_rounding(in_batch, live(single, alone, lengths[[row]])), f"{row=}"
        _, stranger = run(single, one, tokens.rows([row - 1]), lengths[[row]], lengths[[row]])
        assert beyond_rounding(in_batch, live(single, stranger, lengths[[row]])), (
            f"another prompt passes for {row=}"
        )


@cases()
def test_padding_never_enters(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    runs = [
        run(plan, state, tokens, prompts_of(lengths), lengths, padding=p)
        for p in (0.0, np.nan, 3e38)
    ]
    for out, after in runs[1:]:
        assert not differences(live(plan, runs[0][1], lengths), live(plan, after, lengths))
        np.testing.assert_array_equal(out, runs[0][0])


@cases()
def test_padding_past_the_capacity_never_enters(case: MethodCase):
    """A second prompt whose padding does not fit into what is left of the cache."""
    plan, state = empty(case.spec)
    tokens, lengths, zero = sequences(), boundary_lengths(plan), np.zeros(8, np.int32)
    held, own, capacity = prompts_of(lengths), parameters_of(plan), plan.regions.capacity
    _, first, _ = prefill(plan, own, state, tokens.window(zero, held, capacity), tokens.below(plan))
    runs = [
        prefill(plan, own, first, tokens.window(held, lengths, capacity, p), tokens.below(plan))
        for p in (0.0, np.nan, 3e38)
    ]
    real = (np.arange(capacity) < (lengths - held)[:, None])[:, None, :, None]
    for out, after, _ in runs:
        assert not differences(live(plan, runs[0][1], lengths), live(plan, after, lengths))
        np.testing.assert_array_equal(np.where(real, out, 0), np.where(real, runs[0][0], 0))
    assert differences(live(plan, first, lengths), live(plan, runs[0][1], lengths)), (
        "the second prompt is not in the cache"
    )


@cases()
def test_windows_hold_exact_rows_and_the_body_holds_the_rest(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    regions = plan.regions
    _, after = run(plan, state, tokens, prompts_of(lengths), lengths)
    own = parameters_of(plan) or ((), ())
    found = decode_rows(plan, parameters_of(plan), after, jnp.asarray(lengths), tokens.below(plan))
    inputs = tokens.window(lengths * 0, lengths, regions.capacity, 0.0)
    for side, codec in enumerate(plan.codecs):
        of_side = np.asarray(quick_jit(codec.rows)(own[side], inputs)), np.asarray(found[side])
        for n, given, held in zip(lengths, *of_side, strict=True):
            where = f"{side=} length={n}"
            body = max(0, n - regions.sink - regions.recent) // regions.block * regions.block
            exact = np.r_[: min(n, regions.sink), min(n, regions.sink + body) : n]
            assert (row_errors(held[:, exact], given[:, exact]) <= ROUNDING).all(), where
            if len(exact) > 1:
                other = row_errors(held[:, exact], given[:, np.roll(exact, 1)])
                assert (other > ROUNDING).any(), f"{where}: other tokens' rows pass"
            assert n - regions.sink - body < regions.recent + regions.block or not body
            coded = np.s_[:, regions.sink : regions.sink + body]
            error = np.linalg.norm(held[coded] - given[coded])
            assert error <= 0.75 * np.linalg.norm(given[coded]), f"{where}: not these rows"


@cases("innerq2", "mixed")
def test_statistics_come_from_the_prompt_alone(case: MethodCase):
    """The largest keys are those of the first token, in the sink, and of the last."""
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), np.full(8, 40, np.int32)
    k_rot = tokens.k_rot.copy()
    k_rot[:, :, 39, 1::2] = 2 * k_rot[:, :, 0, 1::2]
    k_rot[:, :, 0, ::2] *= 2
    tokens = dataclasses.replace(tokens, k_rot=k_rot)
    params, zero = parameters_of(plan), np.zeros(8, np.int32)
    prompt = tokens.window(zero, lengths, plan.regions.capacity)
    _, after, _ = prefill(plan, params, state, prompt, ())
    largest = np.abs(tokens.k_rot[:, :, :40]).max(axis=2, keepdims=True)
    np.testing.assert_allclose(after.stats[0], np.sqrt(largest), rtol=1e-6)
    louder = dataclasses.replace(tokens, k_rot=3 * tokens.k_rot)
    new = louder.window(lengths, lengths + 30, plan.regions.capacity)
    _, prefilled, _ = prefill(plan, params, after, new, ())
    _, decoded, _ = decode(plan, params, after, louder.window(lengths, lengths + STEP, STEP), ())
    for name, later in (("a second prefill", prefilled), ("a decode step", decoded)):
        np.testing.assert_array_equal(after.stats[0], later.stats[0], err_msg=name)
        assert (np.asarray(later.ring[0]) != after.ring[0]).any(), f"{name} wrote nothing"
    prompt = louder.window(zero, lengths, plan.regions.capacity)
    _, first, _ = prefill(plan, params, state, prompt, ())
    assert (np.asarray(first.stats[0]) > after.stats[0]).any(), "louder keys would not show"


@cases("kvquant4")
def test_what_counts_as_rounding(case: MethodCase):
    """A tenth of the rounding and one other word pass; ten times the rounding, and one other word
    in a thousand, do not."""
    plan, state = empty(case.spec)
    tokens, lengths = sequences(), boundary_lengths(plan)
    held = live(plan, run(plan, state, tokens, lengths, lengths)[1], lengths)
    words = {n: a for n, a in held.items() if np.issubdtype(a.dtype, np.integer)}
    floats = {n: a for n, a in held.items() if n not in words}
    words = {n: a for n, a in words.items() if a.size > 1000}
    assert floats
    assert words
    for name, array in floats.items():
        eps = max(ROUNDING, float(jnp.finfo(array.dtype).eps))
        for factor, passes in ((0.1, True), (10, not array.any())):
            moved = (array.astype(np.float64) * (1 + factor * eps)).astype(array.dtype)
            told = f"{name}: {factor} times the rounding"
            assert bool(beyond_rounding(held | {name: moved}, held)) != passes, told
    for name, array in words.items():
        live_words = np.flatnonzero(array)
        for count, passes in ((1, True), (-(-array.size // 1000), False)):
            changed = array.copy()
            changed.flat[live_words[:count]] ^= 1
            told = f"{name}: {count} words"
            assert bool(beyond_rounding(held | {name: changed}, held)) != passes, told
