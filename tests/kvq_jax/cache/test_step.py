"""A step through the layers of somebody's model: where tokens stand, what is written, and what a
caller is told in one line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvq_jax as kvq
from pallas_kernels.launch import Launch
from tests.kvq_jax.layer_runs import (
    DIMS,
    ROUNDING,
    beyond_rounding,
    layer_weights,
    live,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
    sequences,
)

SPEC = "kivi:bits=4,recent=4,block=8"
CAPACITY = 40


def given(start: list[int], tokens: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (q, k, v; the rest) of T tokens of two sequences, from these positions on."""
    first = np.array(start, np.int32)
    own = sequences(2, seed=seed).window(first, first + tokens, tokens)
    return dict(q=own.q_rot, k=own.k_rot, v=own.v), dict(
        q_pre=own.q_pre, k_pre=own.k_pre, x=own.x, rope=own.rope
    )


def through(
    cache: kvq.cache.Cache,
    start: list[int],
    tokens: int,
    lengths: list[int] | None = None,
    *,
    prefill: bool = False,
    **options: Any,
):
    """Return (attention of both layers, the step, the cache) after one step."""
    step = kvq.begin(
        cache, tokens, None if lengths is None else jnp.asarray(lengths), prefill=prefill, **options
    )
    found = []
    for seed in range(2):
        rows, rest = given(start, tokens, seed)
        out, step = kvq.append_and_attend(step, **rows, **rest)
        found.append(out)
    return found, step, kvq.finish(step)


def new(spec: str = SPEC, capacity: int = CAPACITY) -> kvq.cache.Cache:
    return kvq.init_cache(spec, DIMS, 2, capacity, "float32")


@pytest.mark.parametrize("spec", [SPEC, "xquant_cl:base_layer=0,bits=4,sink=2,recent=3,block=8"])
def test_a_step_is_what_the_layers_do_one_by_one(spec: str):
    """With what a cross-layer method carries from the first layer to the second."""
    plain = new(spec)
    parameters = [parameters_of(plan) for plan in plain.plans]
    _, _, held = through(new(spec), [0, 0], 20, prefill=True, parameters=parameters)
    found, _, cache = through(held, [20, 20], 16, prefill=True, parameters=parameters)
    states = list(plain.layers)
    for start, stop in ((0, 20), (20, 36)):
        carry, expected = (), []
        for layer, (plan, own) in enumerate(zip(plain.plans, parameters, strict=True)):
            inputs = sequences(2, seed=layer).window(
                np.full(2, start, np.int32), np.full(2, stop, np.int32), stop - start
            )
            out, states[layer], carry = prefill(plan, own, states[layer], inputs, carry)
            expected.append(out)
    lengths = np.full(2, 36, np.int32)
    for layer, plan in enumerate(plain.plans):
        assert row_errors(found[layer], expected[layer]).max() <= ROUNDING
        assert row_errors(found[1 - layer], expected[layer]).max() > 1e-1, (
            "the other layer's attention would pass"
        )
        after = live(plan, states[layer], lengths)
        assert not beyond_rounding(live(plan, cache.layers[layer], lengths), after)
        assert beyond_rounding(live(plan, held.layers[layer], lengths), after), (
            "the cache before would pass"
        )


def test_positions_go_on_from_each_rows_length_and_padding_counts_for_nothing():
    _, step, cache = through(new(), [0, 0], 20, [20, 7], prefill=True)
    assert np.asarray(step.valid).sum(axis=1).tolist() == [20, 7]
    assert cache.lengths.tolist() == [20, 7]
    step = kvq.begin(cache, 3, prefill=False)
    assert step.positions.tolist() == [[20, 21, 22], [7, 8, 9]]
    assert step.layer == 0
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(step))


def test_a_row_of_length_0_stays_as_it_is():
    _, _, cache = through(new(), [0, 0], 20, prefill=True)
    _, _, after = through(cache, [20, 20], 2, [2, 0])
    assert after.lengths.tolist() == [22, 20]
    changed = [
        jnp.array_equal(a[1], b[1])
        for a, b in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(after.layers), strict=True)
    ]
    assert all(changed), "row 1 was written"


@pytest.mark.parametrize("tokens", [1, 4])
def test_tokens_past_the_capacity_write_nothing_and_get_nan(tokens: int):
    _, _, cache = through(new(), [0, 0], CAPACITY, [CAPACITY, 30], prefill=True)
    found, step, after = through(cache, [CAPACITY, 30], tokens)
    for out in found:
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1]).all()
    assert np.asarray(step.valid).tolist() == [[False] * tokens, [True] * tokens]
    assert after.lengths.tolist() == [CAPACITY, 30 + tokens]
    for before, now in zip(
        jax.tree.leaves(cache.layers), jax.tree.leaves(after.layers), strict=True
    ):
        np.testing.assert_array_equal(before[0], now[0])


def test_a_prompt_that_does_not_fit_is_cut_and_says_so():
    found, _, cache = through(new(), [0, 0], CAPACITY + 8, prefill=True)
    assert cache.lengths.tolist() == [CAPACITY] * 2
    for out in found:
        assert np.isfinite(out[:, :, :CAPACITY]).all()
        assert np.isnan(out[:, :, CAPACITY:]).all()


@pytest.mark.parametrize("prefill", [True, False])
def test_padding_past_the_capacity_is_finite_and_real_tokens_there_are_nan(prefill: bool):
    real = [4, CAPACITY + 2]
    found, _, cache = through(new(), [0, 0], CAPACITY + 8, real, prefill=prefill)
    assert cache.lengths.tolist() == [4, CAPACITY]
    for out in found:
        assert np.isfinite(out[0]).all()
        lost = np.isnan(out[1]).all(axis=(0, 2))
        assert np.flatnonzero(lost).tolist() == [CAPACITY, CAPACITY + 1]
        assert np.isfinite(out[1][:, ~lost]).all()


def test_steps_in_a_scan_equal_single_steps():
    _, _, start = through(new(), [0, 0], 20, prefill=True)
    per_layer = [given([20, 20], 6, seed) for seed in range(2)]

    def one(cache: kvq.cache.Cache, t: Any) -> tuple[kvq.cache.Cache, Any]:
        step, outs = kvq.begin(cache, 1, prefill=False), []
        for rows, rest in per_layer:
            here = {name: lax.dynamic_slice_in_dim(a, t, 1, 2) for name, a in rows.items()}
            out, step = kvq.append_and_attend(step, **here, rope=rest["rope"])
            outs.append(out)
        return kvq.finish(step), jnp.stack(outs)

    carry = jax.tree.map(jnp.copy, start)
    steps = quick_jit(lambda c: lax.scan(one, c, jnp.arange(6)), donate_argnums=0)
    cache, scanned = steps(carry)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(carry) if leaf.size), (
        "the donated cache was copied, not reused"
    )
    outs, _, _ = through(start, [20, 20], 6)  # six tokens in one step
    assert cache.lengths.tolist() == [26, 26]
    together = np.stack(outs)
    single = np.moveaxis(np.asarray(scanned)[:, :, :, :, 0], 0, 3)
    assert row_errors(single, together).max() <= 1e-5
    assert row_errors(single[..., ::-1, :], together).max() > 1e-1, (
        "the order of tokens does not show"
    )


# --- what a caller is told


def refused(message: str, function: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "kvquant:outliers=0.05",
            r"'kvquant:outliers=0.05' needs .* of layer 0: kvq.parameters.prepare\('kvquant",
        ),
        (
            "k=kvquant:outliers=0.05+v=int4+cache:sink=1,recent=0,block=32,skip_layers=0",
            "needs parameters for keys of layer 1",
        ),
        ("xquant", "needs parameters for keys and values of layer 0"),
        ("int8:subtract_bias=true", "needs parameters for keys of layer 0"),
    ],
)
def test_missing_parameters_are_named_before_any_layer(spec: str, message: str):
    refused(message, kvq.begin, new(spec), 1, prefill=False)


@pytest.mark.parametrize(
    ("spec", "missing", "message"),
    [
        ("kivi:pre_rope=true", "k_pre", "caches keys before RoPE and needs k_pre"),
        ("kivi:pre_rope=true", "rope", "need the model's rope"),
        ("xquant", "x", "caches the layer's input and needs x"),
        ("xquant", "rope", "need the model's rope"),
        ("squat_pre:queries=before_rope", "q_pre", "queries=before_rope needs q_pre"),
    ],
)
def test_what_a_method_reads_beside_queries_keys_and_values_is_named(
    spec: str, missing: str, message: str
):
    weights = layer_weights(DIMS.num_key_value_heads, DIMS.head_dim)
    parameters = [kvq.parameters.prepare(spec, DIMS, i, weights=weights) for i in range(2)]
    step = kvq.begin(new(spec), 8, prefill=True, parameters=parameters)
    rows, rest = given([0, 0], 8)
    refused(message, kvq.append_and_attend, step, **rows, **(rest | {missing: None}))


@pytest.mark.parametrize("spec", ["kvquant", "xquant", "squat_pre:queries=before_rope"])
def test_a_roundtrip_that_needs_more_than_keys_and_values_names_its_remedy(spec: str):
    rows = jnp.zeros((1, 2, 8, 32))
    remedy = r"kvq\.cache\.roundtrip_layer takes it"
    refused(remedy, kvq.roundtrip, spec, rows, rows, rows, layout="BNTH")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            dict(q=(2, 4, 7, 32), k=(2, 2, 7, 32), v=(2, 2, 7, 32)),
            r"q must have shape \[2, 4, 8, 32\] in this step of this cache",
        ),
        (dict(q=(2, 2, 8, 32)), r"q must have shape \[2, 4, 8, 32\]"),
        (dict(k=(2, 1, 8, 32), v=(2, 1, 8, 32)), r"k must have shape \[2, 2, 8, 32\]"),
        (dict(x=(2, 8, 64)), r"x must have shape \[2, 8, 128\]"),
    ],
)
def test_arrays_of_other_shapes_are_refused_by_name(
    shapes: dict[str, tuple[int, ...]], message: str
):
    """Arrays that agree with each other, but not with the step; others are refused by the
    annotations, if these are checked."""
    rows, _ = given([0, 0], 8)
    step = kvq.begin(new(), 8, prefill=True)
    given_rows = rows | {name: jnp.zeros(shape) for name, shape in shapes.items()}
    refused(message, kvq.append_and_attend, step, **given_rows)


def test_steps_that_do_not_fit_the_cache_are_refused():
    refused("tokens=0 must be an integer of at least 1", kvq.begin, new(), 0, prefill=True)
    three, options = jnp.ones(3, jnp.int32), {"prefill": True, "parameters": [((), ())]}
    refused(r"must be \[2\], got shape \(3,\)", kvq.begin, new(), 1, three, prefill=True)
    refused("an entry for each of the 2 layers, got 1", kvq.begin, new(), 1, **options)


def test_layers_are_run_once_and_all_of_them():
    rows, _ = given([0, 0], 8)
    step = kvq.begin(new(), 8, prefill=True)
    _, step = kvq.append_and_attend(step, **rows)
    refused("went through 1 of 2 layers", kvq.finish, step)
    _, step = kvq.append_and_attend(step, **rows)
    refused("2 layers, and the step went through all of", kvq.append_and_attend, step, **rows)
    large, options = new("kivi:bits=4", 512), {"implementation": Launch(interpret=True)}
    refused("2 new tokens in one step", through, large, [0, 0], 2, **options)
