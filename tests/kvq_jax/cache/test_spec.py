"""The spec grammar: parse(str(spec)) == spec, one spelling per meaning, errors that list what is
allowed."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.methods.base import Method, PerLayer
from kvq_jax.methods.dense import DenseCodec
from kvq_jax.methods.innerq import InnerQ

DIMS = CacheDims(4, 4, 2, 64, 256)
ONE_LINE = r"\A[^\n]+\Z"
MIXED = "k=kivi:bits=4+v=innerq+cache:sink=4,skip_layers=1"
LARGE = "k=kvquant:outliers=1e-05+v=squat:lam=2.5e+300"


Drawn = tuple[Method, dict[str, Any]]  # a method with its defaults, and the options to change


def values(field: dataclasses.Field) -> st.SearchStrategy:
    """Values of one option, as its declaration allows them; a pair stands for the fields of a
    `PerLayer`."""
    choices = field.metadata["choices"]
    if field.metadata["per_layer"]:
        one = st.sampled_from(choices or [0, 3, 4310, 44211000])
        ranges = st.lists(
            st.tuples(one, st.integers(0, 9), st.integers(0, 9)).map(
                lambda r: (r[0], r[1], r[1] + r[2])
            ),
            min_size=1,
            max_size=3,
        )
        return one | st.tuples(ranges.map(tuple), one)
    if choices:
        return st.sampled_from(choices)
    if isinstance(field.default, float):
        return st.floats(min_value=0, allow_infinity=False)
    return st.booleans() if isinstance(field.default, bool) else st.sampled_from([0, 8, 16, 32])


def method(default: Method) -> st.SearchStrategy[Drawn]:
    """Options that stand for others are drawn without them."""
    drawn = {f.name: values(f) for f in default.options()}
    given = [
        {f: drawn[f] for f in drawn if f not in others} for others in default.replaces.values()
    ]
    left_out = {f: drawn[f] for f in drawn if f not in default.replaces}
    return st.tuples(
        st.just(default),
        st.one_of([st.fixed_dictionaries(options) for options in (left_out, *given)]),
    )


def methods(keys: bool = True) -> st.SearchStrategy[Drawn]:
    chosen = (one for one in kvq.methods.METHODS.values() if keys or not one.keys_only)
    return st.one_of(list(map(method, chosen)))


def specs() -> st.SearchStrategy[tuple[Any, ...]]:
    """Return the fields of a `CacheSpec`. It is built in the test: the checker of types draws
    random numbers, which no strategy may."""
    tokens = st.integers(0, 200)
    layers = st.sets(st.integers(0, 40)).map(lambda s: tuple(sorted(s)))
    rest = (tokens, tokens, st.integers(1, 128), layers, st.booleans())
    alone = st.tuples(methods(), *rest).map(lambda drawn: (drawn[0], *drawn))
    return alone | st.tuples(methods(), methods(keys=False), *rest)


def built(default: Method, options: dict[str, Any]) -> Method:
    changed = {
        name: PerLayer(*value) if isinstance(value, tuple) else value
        for name, value in options.items()
    }
    return dataclasses.replace(default, **changed)


@given(specs())
def test_parse_inverts_str(drawn: tuple[Any, ...]):
    k, v, *rest = drawn
    spec = kvq.cache.CacheSpec(built(*k), built(*v), *rest)
    assert kvq.parse(str(spec)) == spec
    assert hash(kvq.parse(str(spec))) == hash(spec)


def test_a_name_alone_is_the_method_that_the_registry_has_under_it():
    for name, method in kvq.methods.METHODS.items():
        assert (kvq.parse(name).k, method.name, str(kvq.parse(name))) == (method, name, name)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("kivi:bits=2", "kivi"),
        (" kivi : bits=4 , recent=32 ".replace(" : ", ":"), "kivi:bits=4,recent=32"),
        ("innerq:normalize=TRUE", "innerq"),
        ("dense:block=1", "dense"),
        ("k=kivi+v=kivi", "kivi"),
        ("v=kivi+k=innerq", "k=innerq+v=kivi"),
        ("kivi:skip_layers=3/0-1/2", "kivi:skip_layers=0-3"),
        (MIXED, MIXED),
        ("int4:subtract_bias=True,pre_rope=true", "int4:pre_rope=true,subtract_bias=true"),
        ("k=kivi+v=innerq+cache:subtract_bias=true", "k=kivi+v=innerq+cache:subtract_bias=true"),
        ("kivi:subtract_bias=false", "kivi"),
        ("k=squat:lam=1e16+v=kivi+cache:sink=4", "k=squat:lam=1e+16+v=kivi+cache:sink=4"),
        (LARGE, LARGE),
        ("innerq:total_bits=0,bits=3", "innerq:bits=3"),
    ],
)
def test_one_spelling_per_meaning(text: str, canonical: str):
    assert str(kvq.parse(text)) == canonical


def test_equal_specs_hash_equal_and_jit_traces_once():
    traces = []

    def step(x, spec):
        traces.append(spec)
        return x + spec.block

    jitted = jax.jit(step, static_argnames="spec")
    for text in (
        "kivi:bits=4,recent=32",
        "kivi:recent=32,bits=4,block=32",
        "k=kivi:bits=4+v=kivi:bits=4+cache:recent=32",
    ):
        jitted(jnp.ones(2), spec=kvq.parse(text))
    assert len(traces) == 1
    jitted(jnp.ones(2), spec=kvq.parse("kivi:bits=2,recent=32"))
    assert len(traces) == 2


def test_bits_and_skipped_layers_differ_by_layer():
    spec = kvq.parse("k=kivi:bits=4@0/8@1-2/2+v=kivi:bits=2@3/3+cache:skip_layers=2")
    plans = kvq.cache.layout(spec, DIMS, 1, 256).plans
    assert [plan.k.format.bits for plan in plans if not isinstance(plan.k, DenseCodec)] == [4, 8, 2]
    assert [plan.v.format.bits for plan in plans if not isinstance(plan.v, DenseCodec)] == [3, 3, 2]
    assert isinstance(plans[2].k, DenseCodec)
    assert isinstance(plans[2].v, DenseCodec)
    assert plans[2].regions == plans[0].regions


def test_a_mixed_cache_takes_the_larger_windows_and_the_common_block():
    spec = kvq.parse("k=kivi:group_size=24+v=innerq:group_size=16")
    assert (spec.sink, spec.recent, spec.block) == (32, 96, 48)


def test_total_bits_count_the_sign():
    spec = kvq.parse("innerq:total_bits=3")
    assert spec.layer(0, DIMS, 64, "float32").k == InnerQ().codec("k", 0, DIMS, 32, "float32")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kivvi", ("kivvi", "dense, kivi, innerq")),
        ("kivi:bit=2", ("'bit'", "bits, group_size", "sink, recent, block, skip_layers")),
        ("kivi:bits=7", ("bits=7", "2, 3, 4, 8")),
        ("kivi:bits=two", ("bits=two", "2 | 3 | 4 | 8")),
        ("innerq:mode=best", ("mode=best", "hybrid, sym, asym")),
        ("innerq:normalize=maybe", ("normalize=maybe", "true or false")),
        ("KIVI", ("'KIVI'", "Did you mean kivi?")),
        ("kivi,bits=2", ("'kivi,bits=2'", "Did you mean kivi:bits=2?")),
        ("none", ("'none'", "Did you mean dense?")),
        ("kivi:grup_size=16", ("'grup_size'", "Did you mean group_size?")),
        ("kivi:bits", ("'bits'", "option=value")),
        ("kivi:bits=2,bits=4", ("bits", "twice")),
        ("kivi:group_size=-8", ("group_size=-8", "negative")),
        ("kivi:block=0", ("block=0", "at least 1")),
        ("kivi:skip_layers=a", ("skip_layers=a", "0-2/31")),
        ("k=kivi:subtract_bias=true+v=kivi", ("subtract_bias", "+cache:subtract_bias=true")),
        ("k=kivi", ("both sides",)),
        ("k=kivi+v=kivi+w=kivi", ("k=METHOD+v=METHOD",)),
        ("k=kivi:recent=4+v=kivi", ("recent", "+cache:recent=4")),
        ("k=kivi+v=kivi+cache:bits=2", ("'bits'", "sink, recent, block, skip_layers")),
        ("", ("''", "dense, kivi, innerq")),
        ("kivi:skip_layers=3-1", ("skip_layers=3-1", "no layer is in 3-1", "write 1-3")),
        ("kivi:bits=4@2-0/2", ("kivi:bits=4@2-0/2", "no layer is in 2-0", "write 0-2")),
        ("kivi:skip_layers=0-999999999999", ("names layer 999999999999", "below 4096")),
        ("innerq:total_bits=3,bits=2", ("total_bits=3 stands for bits=2",)),
        ("k=kivi+v=polarquant:radius_bits=2", ("v=polarquant", "write v=dense")),
        ("kvquant:outliers=inf", ("outliers=inf", "finite")),
    ],
)
def test_errors_are_one_line_and_list_what_is_allowed(text: str, parts: tuple[str, ...]):
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        kvq.parse(text)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_spec_built_by_hand_is_checked_before_it_is_used():
    polar, dense = (kvq.methods.METHODS[name] for name in ("polarquant", "dense"))
    for spec, message in ((kvq.cache.CacheSpec(dense, polar, 0, 0, 128), "write v=dense"),):
        with pytest.raises(ValueError, match=ONE_LINE) as error:
            kvq.init_cache(spec, DIMS, 1, 64)
        assert message in str(error.value)
    kvq.init_cache(kvq.cache.CacheSpec(polar, polar, 0, 0, 128), DIMS, 1, 64)


KIVI = kvq.parse("kivi")


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 0}, "block=0 must be at least 1 and below"),
        ({"recent": -5}, "recent=-5 must be at least 0 and below"),
        ({"recent": 1.5}, "recent=1.5 must be at least 0 and below"),
        ({"skip_layers": (-1,)}, "skip_layers=(-1,) must be layers from 0 to 4095"),
        ({"skip_layers": (5000,)}, "skip_layers=(5000,) must be layers from 0 to 4095"),
        ({"k": KIVI}, "k must be a method, such as kvq.parse('kivi').k, got CacheSpec"),
        ({"k": {"bits": 5}}, "kivi:bits=5 is not allowed; choose from 2, 3, 4, 8"),
        ({"v": {"bits": PerLayer(((2, 3, 1),), 2)}}, "kivi:bits=2@3-1/2: no layer is in 3-1"),
        ({"v": {"group_size": -1}}, "kivi:group_size=-1 must be not negative"),
    ],
)
def test_a_spec_whose_text_could_not_be_read_is_not_made(changes: dict[str, Any], message: str):
    methods = {
        side: dataclasses.replace(KIVI.k, **value)
        for side, value in changes.items()
        if isinstance(value, dict)
    }
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        dataclasses.replace(KIVI, **changes | methods)
    assert message in str(error.value)


@pytest.mark.usefixtures("types_unchecked")
def test_a_spec_of_numbers_of_numpy_is_that_of_its_text():
    given: Any = {"skip_layers": [np.int64(3), 0, 3], "recent": np.int64(8)}
    spec = dataclasses.replace(KIVI, **given)
    assert spec == kvq.parse("kivi:skip_layers=0/3,recent=8") == kvq.parse(str(spec))
    assert hash(spec) == hash(kvq.parse(str(spec)))


def test_no_method_makes_a_block_of_nothing():
    for name, method in kvq.methods.METHODS.items():
        if "group_size" in {option.name for option in method.options()}:
            spec = kvq.parse(f"{name}:group_size=0")
            assert spec.block >= 1, name
            assert kvq.init_cache(spec, DIMS, 1, 300).layers, name
    polar = kvq.parse("polarquant:group_size=0").layer(0, DIMS, 300, "float32").k
    assert polar == kvq.parse("polarquant").layer(0, DIMS, 300, "float32").k


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("batch", "capacity", "message"),
    [
        (0, 8, "batch=0"),
        (1, 0, "capacity=0"),
        (1.5, 8, r"batch=1\.5"),
        (1, 8.0, r"capacity=8\.0"),
        (1, True, "capacity=True"),
    ],
)
def test_sizes_that_are_no_numbers_of_rows_or_tokens_are_refused(
    batch: Any, capacity: Any, message: str
):
    with pytest.raises(ValueError, match=rf"\A{message} must be an integer of at least 1\Z"):
        kvq.init_cache("dense", DIMS, batch, capacity)


@pytest.mark.usefixtures("types_unchecked")
def test_sizes_may_be_integers_of_numpy():
    cache = kvq.init_cache("kivi:block=8", DIMS, cast(Any, np.int64(1)), cast(Any, np.int64(264)))
    assert (type(cache.batch), type(cache.capacity)) == (int, int)
    assert cache.plans == kvq.init_cache("kivi:block=8", DIMS, 1, 264).plans


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be an integer of at least 1"),
        ({"head_dim": -64}, "head_dim=-64 must be an integer of at least 1"),
    ],
)
def test_dimensions_of_no_model_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        kvq.init_cache("kivi", dataclasses.replace(DIMS, **sizes), 1, 64)


def test_the_windows_of_a_preset_hold_in_a_mixed_cache_too():
    alone, mixed = kvq.parse("squat:preset=lm-eval"), kvq.parse("k=squat:preset=lm-eval+v=kivi")
    assert (mixed.k, mixed.sink, mixed.recent) == (alone.k, alone.sink, alone.recent)
    assert mixed.recent != kvq.parse("k=squat+v=kivi").recent
    assert kvq.parse("k=squat:preset=lm-eval+v=kivi+cache:recent=64").recent == 64
    assert (
        kvq.parse("k=squat:preset=lm-eval+v=gear:preset=kcvt").block
        == kvq.parse("gear:preset=kcvt").block
    )


@pytest.mark.usefixtures("types_unchecked")
def test_dimensions_may_be_of_numpy_and_in_lists(tmp_path):
    given: Any = {
        "num_hidden_layers": np.int64(2),
        "head_dim": np.int32(64),
        "attention": [kvq.Attention(window=np.int64(96), scale=np.float32(0.125))] * 2,
        "layer_heads": [[np.int64(2), np.int64(64)]] * 2,
    }
    dims = dataclasses.replace(DIMS, **given)
    plain = dataclasses.replace(
        DIMS,
        num_hidden_layers=2,
        attention=(kvq.Attention(window=96, scale=0.125),) * 2,
        layer_heads=((2, 64),) * 2,
    )
    assert (dims, hash(dims), dims.to_json()) == (plain, hash(plain), plain.to_json())
    kvq.files.save(kvq.init_cache("kivi", dims, 1, 256), tmp_path / "cache.safetensors")
    for size in (0, -1, 1.5, True, "96", np.nan):
        with pytest.raises(ValueError, match="must be positive and finite, or None"):
            kvq.Attention(window=cast(Any, size))
