"""The cache of one layer is the layer of a cache of all layers, bit for bit, and fits wherever a
model keeps a layer's keys and values."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvq_jax as kvq
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    ROUNDING,
    beyond_rounding,
    differences,
    live,
    parameters_of,
    row_errors,
    sequences,
)
from tests.methods_table import METHOD_CASES, MethodCase, cases

TOKENS, REAL = 40, [40, 27]  # of a prompt; the second is padded
SPEC = "kivi:bits=4,recent=8,block=16,sink=2"


def rows(start: int, tokens: int, real: list[int], seed: int = 0) -> dict[str, Any]:
    """Return the arrays of new tokens of two sequences, heads first, padded on the right."""
    first = np.full(2, start, np.int32)
    window = sequences(2, seed=seed).window(first, first + np.array(real), tokens, padding=0.0)
    names = dict(q=window.q_rot, k=window.k_rot, v=window.v, q_pre=window.q_pre)
    return names | dict(k_pre=window.k_pre, x=window.x, rope=window.rope)


def tokens_first(arrays: dict[str, Any]) -> dict[str, Any]:
    return {n: jnp.swapaxes(a, 1, 2) if n[0] in "qkv" else a for n, a in arrays.items()}


def padded_left(arrays: dict[str, Any], real: list[int]) -> dict[str, Any]:
    """Return tokens-first arrays with the padding moved to the left."""

    def moved(array: jax.Array) -> jax.Array:
        shift = [array.shape[1] - n for n in real]
        return jnp.stack([jnp.roll(a, s, axis=0) for a, s in zip(array, shift, strict=True)])

    return {n: a if n == "rope" else moved(a) for n, a in arrays.items()}


def plan_of(spec: str, **options: Any) -> kvq.cache.CachePlan:
    return kvq.layer_plan(spec, DIMS, layer=1, capacity=CAPACITY, dtype="float32", **options)


def real_rows(out: jax.Array, real: list[int]) -> np.ndarray:
    """Return the rows [tokens, N, H] of real tokens, of attention that is tokens first and padded
    on the right."""
    return np.concatenate([np.asarray(o[:n]) for o, n in zip(out, real, strict=True)])


# one row for each set of arrays that a method reads; the others run with --exhaustive
@cases(*(case.id for case in METHOD_CASES), usual=("kivi2", "squat3_pre", "xquant4"))
def test_one_layer_is_the_layer_of_the_whole_cache_bit_for_bit(case: MethodCase):
    if "xquant_cl" in case.spec:
        pytest.skip("a method that builds on the layer below is refused")
    plan, one = plan_of(case.spec), kvq.CacheDims(1, 4, 2, 32, 128)
    whole = kvq.init_cache(case.spec, one, 2, CAPACITY, "float32")
    parameters = parameters_of(plan.layer)
    assert whole.plans[0] == plan.layer, "the case differs by layer"
    right = left = plan.init(2)
    before = live(plan.layer, right.state, np.array(REAL))
    for start, tokens, real, prefill in ((0, TOKENS, REAL, True), (TOKENS, 1, [1, 1], False)):
        arrays, options = rows(start, tokens, real), dict(prefill=prefill, parameters=parameters)
        step = kvq.begin(whole, tokens, jnp.array(real), prefill=prefill, parameters=[parameters])
        out, step = kvq.append_and_attend(step, **arrays)
        whole = kvq.finish(step)
        expected = real_rows(jnp.swapaxes(out, 1, 2), real)
        out, right = plan.attend(right, **arrays, **options, lengths=real, layout="BNTH")
        assert np.array_equal(real_rows(jnp.swapaxes(out, 1, 2), real), expected)
        arrays = padded_left(tokens_first(arrays), real)
        out, left = plan.attend(left, **arrays, **options, lengths=real, padding="left")
        back = jnp.stack([jnp.roll(o, n - tokens, axis=0) for o, n in zip(out, real, strict=True)])
        assert np.array_equal(real_rows(back, real), expected), "padding on the left differs"
        if prefill:
            assert not np.array_equal(real_rows(out, real), expected), "any side would pass"
        lengths = np.asarray(whole.lengths)
        state = live(plan.layer, whole.layers[0], lengths)
        for cache in (right, left):
            assert not differences(live(plan.layer, cache.state, lengths), state)
            assert cache.lengths.tolist() == lengths.tolist()
        assert differences(before, state), "a step that writes nothing would pass"
        before = state


def prompted(plan: kvq.cache.CachePlan, seed: int) -> kvq.cache.LayerCache:
    arrays = rows(0, TOKENS, REAL, seed)
    return plan.attend(plan.init(2), **arrays, prefill=True, lengths=REAL, layout="BNTH")[1]


def test_stacked_layers_are_scanned_in_place():
    plan = plan_of(SPEC)
    caches = [prompted(plan, seed) for seed in range(3)]
    arrays = [tokens_first(rows(TOKENS, 1, [1, 1], seed)) for seed in range(3)]
    names = ("q", "k", "v")
    expected = [
        plan.attend(c, *(a[n] for n in names), prefill=False)
        for c, a in zip(caches, arrays, strict=True)
    ]

    def layers(caches: kvq.cache.LayerCache, arrays: Any) -> Any:
        def one(carry: Any, layer: Any) -> Any:
            cache, (q, k, v) = layer
            out, cache = plan.attend(cache, q, k, v, prefill=False)
            return carry, (out, cache)

        return lax.scan(one, (), (caches, arrays))[1]

    def stack(*trees: Any) -> Any:
        return jax.tree.map(lambda *a: jnp.stack(a), *trees)

    whole = stack(*caches)
    outs, after = jax.jit(layers, donate_argnums=0)(
        whole, stack(*(tuple(a[n] for n in names) for a in arrays))
    )
    assert all(a.is_deleted() for a in jax.tree.leaves(whole) if a.size), "the caches were copied"
    lengths = np.array(REAL) + 1
    for layer, (out, cache) in enumerate(expected):
        mine = jax.tree.map(lambda a, layer=layer: a[layer], after)
        assert row_errors(outs[layer], out).max() <= ROUNDING
        assert row_errors(outs[layer - 1], out).max() > 0.1, "another layer's would pass"
        state = live(plan.layer, cache.state, lengths)
        assert not beyond_rounding(live(plan.layer, mine.state, lengths), state)
        assert mine.lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("spec", [SPEC, "squat:rank=3,lam=0.01,sink=0,recent=12,block=16"])
def test_a_prompt_is_appended_without_attention(spec: str):
    """For hosts whose own flash attention reads the prompt."""
    plan, arrays = plan_of(spec), tokens_first(rows(0, TOKENS, REAL))
    given = {n: a for n, a in arrays.items() if n in (("q", "k", "v") if "squat" in spec else "kv")}
    cache = plan.append(plan.init(2), **given, lengths=REAL)
    attended = prompted(plan, 0)
    lengths = np.array(REAL)
    states = (live(plan.layer, c.state, lengths) for c in (cache, attended, plan.init(2)))
    found, expected, empty = states
    assert not beyond_rounding(found, expected)
    assert beyond_rounding(empty, expected)
    if "squat" in spec:
        with pytest.raises(ValueError, match="reads queries: give append q"):
            plan.append(plan.init(2), arrays["k"], arrays["v"])


def test_dequantized_rows_give_the_attention_of_any_mask():
    plan = plan_of(SPEC)
    cache, arrays = prompted(plan, 0), tokens_first(rows(TOKENS, 1, [1, 1]))
    q, k, v = (arrays[n] for n in ("q", "k", "v"))
    out, after = plan.attend(cache, q, k, v, prefill=False)
    keys, values = plan.read(after)
    assert keys.shape == (2, CAPACITY, 2, 32)
    seen = jnp.arange(CAPACITY)[None] < after.lengths[:, None]
    own = jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None, None])
    assert row_errors(own, out).max() <= ROUNDING
    other = jax.nn.dot_product_attention(q, keys, values, mask=seen[::-1, None, None])
    assert row_errors(other, out).max() > 0.1, "any mask would pass"


def test_a_call_may_set_its_scale_cap_and_sinks_but_not_the_window():
    plan = plan_of(SPEC)
    arrays = tokens_first(rows(0, TOKENS, [TOKENS] * 2))
    q, k, v = (arrays[n] for n in ("q", "k", "v"))
    sinks = jnp.arange(4.0)
    asked = dict(scale=0.5, soft_cap=20.0)
    out, lse, _ = plan.attend(plan.init(2), q, k, v, prefill=True, sinks=sinks, lse=True, **asked)
    planned = plan_of(SPEC, attention=kvq.Attention(**asked, sinks=True))
    same, _ = planned.attend(planned.init(2), q, k, v, prefill=True, sinks=sinks)
    assert row_errors(out, same).max() <= ROUNDING
    usual, residual = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert row_errors(usual, out).max() > 0.1
    plain, of_plain, _ = plan.attend(plan.init(2), q, k, v, prefill=True, lse=True)
    np.testing.assert_allclose(of_plain, residual, rtol=1e-4, atol=1e-4)
    assert row_errors(plain, usual).max() <= ROUNDING
    assert np.abs(lse - of_plain).max() > 0.1
    assert out.dtype == q.dtype
    with pytest.raises(ValueError, match=r"window=8, but the cache is made for window=None: give"):
        plan.attend(plan.init(2), q, k, v, prefill=True, window=8)
    with pytest.raises(ValueError, match="has sinks, and sinks are missing"):
        planned.attend(planned.init(2), q, k, v, prefill=True)


def test_a_call_may_repeat_the_window_of_its_plan():
    q, k, v = (jnp.zeros((2, 4, heads, 32)) for heads in (4, 2, 2))
    local = plan_of(SPEC, attention=kvq.Attention(window=8))
    whole = plan_of(SPEC)

    def shape(plan: kvq.cache.CachePlan, window: int) -> tuple[int, ...]:
        def call() -> jax.Array:
            return plan.attend(plan.init(2), q, k, v, prefill=True, window=window)[0]

        return jax.eval_shape(call).shape

    assert shape(local, 8) == q.shape
    assert shape(whole, CAPACITY) == q.shape, "a window that holds all tokens is none"
    for plan, window in ((local, 7), (whole, 8)):
        with pytest.raises(ValueError, match=f"{window=}, but the cache is made for"):
            shape(plan, window)


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:skip_layers=0",
        "k=kivi:bits=2+v=int4",
        "waterfill:bits=2.5,k_widths=4@0-1/2,skip_layers=3",
    ],
)
def test_each_layer_has_the_plan_that_it_has_in_a_cache_of_all_layers(spec: str):
    windows = tuple(kvq.Attention(window) for window in (None, 40, 40, None))
    dims = kvq.CacheDims(4, 4, 2, 32, 128, windows)
    whole = kvq.cache.layout(spec, dims, 2, 200, "float32").plans
    for i, expected in enumerate(whole):
        alone = kvq.layer_plan(spec, dims, layer=i, capacity=200, dtype="float32")
        assert alone.layer == expected, i
    assert len(set(whole)) > 1, "one plan for all layers would pass"


def test_codecs_follow_the_attention_of_a_call():
    """The probes of zipcache have the scale of the call."""
    spec, arrays = (
        "zipcache:probes=8,sink=2,recent=3,block=16",
        tokens_first(rows(0, TOKENS, [TOKENS] * 2)),
    )

    def salient(plan: Any, **asked: Any) -> np.ndarray:
        q, k, v = (arrays[n] for n in ("q", "k", "v"))
        _, cache = plan.attend(plan.init(2), q, k, v, prefill=True, **asked)
        return np.asarray(cache.state.body[0].mask)

    asked = salient(plan_of(spec), scale=3.0)
    planned = salient(plan_of(spec, attention=kvq.Attention(scale=3.0)))
    np.testing.assert_array_equal(asked, planned)
    assert (asked != salient(plan_of(spec))).any()


def test_positions_follow_the_real_tokens():
    plan = plan_of(SPEC)
    cache = plan.init(2)
    assert plan.positions(cache, 4).tolist() == [[0, 1, 2, 3]] * 2
    left = plan.positions(cache, 4, [4, 2], "left")
    assert left.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    longer = plan.positions(cache, CAPACITY + 8, [4, 2], "left")
    assert longer[:, -2:].tolist() == [[2, 3], [0, 1]], "padding takes no room"
    assert plan.positions(prompted(plan, 0), 1).tolist() == [[40], [27]]


def test_plans_of_equal_layers_are_equal_and_hash_alike():
    first, other = (kvq.layer_plan(SPEC, DIMS, layer=i, capacity=CAPACITY) for i in range(2))
    assert first == other
    assert hash(first) == hash(other)
    assert first != kvq.layer_plan(SPEC, DIMS, layer=0, capacity=CAPACITY + 1)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(spec="xquant_cl:base_layer=0"), "builds layer 1 on the one below"),
        (dict(layer=2), "layer=2, but the model has layers 0 to 1"),
        (dict(capacity=0), "capacity=0"),
        (dict(spec="xquant"), "needs parameters for keys and values of layer 1"),
        (dict(q=jnp.zeros((2, 4, 3, 32))), r"q must have shape \[2, 4, 4, 32\]"),
        (
            dict(k=jnp.zeros((2, 4, 3, 32)), v=jnp.zeros((2, 4, 3, 32))),
            r"k must have shape \[2, 4, 2, 32\].*, got \[2, 4, 3, 32\]",
        ),
        (
            {name: jnp.zeros((2, 0, 4 if name == "q" else 2, 32)) for name in "qkv"},
            r"q must hold at least one token, got shape \[2, 0, 4, 32\]",
        ),
        (dict(lengths=[1, 2**40], padding="left"), "lengths must fit int32"),
        (dict(lengths=[1, 2, 3]), r"lengths must be \[2\]"),
        (dict(lengths=[1, 2, 3], padding="left"), r"lengths must be \[2\], got shape \(3,\)"),
        (dict(lengths=3, padding="left"), r"lengths must be \[2\], got shape \(\)"),
        (dict(sinks=jnp.zeros(2)), r"sinks must have shape \[4\].*, got \[2\]"),
        (dict(lengths=[1, 5]), "lengths must be between 0 and 4, got 5"),
        (dict(lengths=jnp.array([-1, 4])), "lengths must be between 0 and 4, got -1"),
        (dict(q=jnp.zeros((2, 4, 4, 32), int)), "q must hold floats, such as float32, got int32"),
        (dict(k=np.zeros((2, 4, 2, 32), bool)), "k must hold floats, such as float32, got bool"),
        (dict(v=jnp.zeros((2, 4, 2, 32), complex)), "v must hold floats, .*, got complex64"),
        (dict(q=jnp.zeros((4, 32))), r"q must be an array \[B, T, N, H\], got \(4, 32\)"),
        (dict(q=[[[[0.0]]]]), r"q must be an array \[B, T, N, H\], got list"),
        (dict(k=None), r"k must have shape \[2, 4, 2, 32\] .*, got NoneType"),
        (dict(sinks=[0.0] * 4), r"sinks must have shape \[4\].*, got list"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(options: dict[str, Any], message: str):
    of_plan = {"layer": 1, "capacity": 64, "spec": SPEC}
    of_plan = {name: options.pop(name, value) for name, value in of_plan.items()}
    arrays = {n: jnp.zeros((2, 4, heads, 32)) for n, heads in (("q", 4), ("k", 2), ("v", 2))}

    def attend() -> None:
        plan = kvq.layer_plan(of_plan.pop("spec"), DIMS, **of_plan)
        plan.attend(plan.init(2), **(arrays | options), prefill=True)

    with pytest.raises(ValueError, match=message) as error:
        attend()
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("made", "differing"),
    [
        (dict(spec="kivi:bits=2,recent=8,block=16,sink=2"), "(body)"),
        (dict(spec="kivi:bits=4,recent=8,block=16,sink=4"), "(sink)"),
        (dict(capacity=256), "(body)"),
        (dict(dtype="bfloat16"), "(sink, ring)"),
        (dict(attention=kvq.Attention(window=8)), "(sink, body, floor)"),
    ],
)
def test_the_cache_of_another_plan_is_refused_in_a_line(made: dict[str, Any], differing: str):
    """One of another dtype, or with room for more tokens, was read in silence."""
    asked = dict(spec=SPEC, layer=0, capacity=128, dtype="float32")
    plan, other = (kvq.layer_plan(dims=DIMS, **(asked | own)) for own in ({}, made))
    q, k, v = (jnp.zeros((2, 4, heads, 32)) for heads in (4, 2, 2))
    calls = (
        lambda cache: plan.attend(cache, q, k, v, prefill=True),
        lambda cache: plan.append(cache, k, v),
        plan.read,
    )
    whole = kvq.init_cache(SPEC, DIMS, 2, 128, "float32")
    stacked = jax.tree.map(lambda array: array[None], plan.init(2))
    for call in calls:
        for cache, message in (
            (other.init(2), re.escape(f"not made by this plan {differing}: plan.init")),
            (stacked, "not made by this plan"),
            (whole, "takes the LayerCache that its init makes, got Cache"),
        ):
            with pytest.raises(ValueError, match=message) as error:
                call(cache)
            assert "\n" not in str(error.value)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("k", "v", "q", "message"),
    [
        ((2, 4, 32), (2, 4, 32), None, r"k must be an array \[B, T, N, H\], got \(2, 4, 32\)"),
        ((2, 4, 2, 32), (2, 4, 1, 32), None, r"v must have shape \[2, 4, 2, 32\].*\[2, 4, 1, 32\]"),
        ((2, 4, 2, 32), (1, 4, 2, 32), None, r"v must have shape \[2, 4, 2, 32\].*\[1, 4, 2, 32\]"),
        ((2, 4, 2, 32), (2, 3, 2, 32), None, r"v must have shape \[2, 4, 2, 32\].*\[2, 3, 2, 32\]"),
        ((2, 4, 2, 32),) * 2
        + ((2, 3, 4, 32), r"q must have shape \[2, 4, 2, 32\].*\[2, 3, 4, 32\]"),
        ((2, 4, 2, 32),) * 2
        + ((2, 4, 3, 32), r"q must have shape \[2, 4, 2, 32\].*\[2, 4, 3, 32\]"),
    ],
)
def test_rows_that_do_not_fit_each_other_make_no_roundtrip(k: Any, v: Any, q: Any, message: str):
    arrays = [None if shape is None else np.zeros(shape, np.float32) for shape in (k, v, q)]
    with pytest.raises(ValueError, match=message) as error:
        kvq.roundtrip("squat:bits=4" if q else "kivi:bits=4", *arrays, layout="BTNH")
    assert "\n" not in str(error.value)


def test_a_roundtrip_is_of_the_layer_that_a_spec_names():
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 32, 32)), jnp.float32)
    for spec in ("kivi:skip_layers=0", "waterfill:k_widths=4@0-1/2"):
        with pytest.raises(ValueError, match=f"{spec}' names layers: give roundtrip .*, layer="):
            kvq.roundtrip(spec, rows, rows, layout="BNTH")
    spec = "kivi:bits=2,skip_layers=0"
    exact, quantized = (
        kvq.roundtrip(spec, rows, rows, layout="BNTH", layer=layer)[0] for layer in (0, 1)
    )
    np.testing.assert_array_equal(exact, rows)
    of_all = kvq.roundtrip("kivi:bits=2", rows, rows, layout="BNTH")[0]
    np.testing.assert_array_equal(quantized, of_all)
    assert row_errors(quantized, rows).max() > 0.1


def test_a_roundtrip_takes_the_layout_by_name_and_keeps_the_dtypes():
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((1, 32, 2, 32)), jnp.float32)
    with pytest.raises(TypeError, match="argument: 'layout'"):
        kvq.roundtrip("kivi", rows, rows)
    for layout in ("BTNH", "BNTH"):
        k, v = kvq.roundtrip("kivi", rows.astype(jnp.bfloat16), rows, layout=layout)
        assert (k.dtype, v.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.usefixtures("types_unchecked")
def test_no_rows_and_unknown_layouts_are_refused():
    plan, rows = kvq.layer_plan(SPEC, DIMS, layer=0, capacity=64), jnp.zeros((1, 2, 4, 32))
    with pytest.raises(ValueError, match="batch=0 must be an integer of at least 1"):
        plan.init(0)
    with pytest.raises(ValueError, match="k must be an array"):
        plan.append(plan.init(2), [0.0], [0.0])
    for read in (plan.read, lambda cache, layout: kvq.roundtrip("kivi", rows, rows, layout=layout)):
        with pytest.raises(ValueError, match="layout='BTHN': choose 'BTNH' or 'BNTH'"):
            read(plan.init(1), layout="BTHN")
