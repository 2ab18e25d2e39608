"""Mistakes that people make with the public names: each is one line that says what to pass, or
works."""

import copy
import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.paged_cache import paged_plan

DIMS = kvq.CacheDims(2, 4, 2, 32, 64)
SPEC = "kivi:bits=2,recent=8,block=8"
Q, K = jnp.zeros((2, 4, 3, 32)), jnp.zeros((2, 2, 3, 32))
INVERSE = jnp.ones(16)


@functools.cache
def cache() -> kvq.cache.Cache:
    return kvq.init_cache(SPEC, DIMS, 2, 16, "float32")


@functools.cache
def plan() -> Any:
    return kvq.layer_plan(SPEC, DIMS, layer=0, capacity=16, dtype="float32")


def attend_layer(cache: Any, **options: Any) -> Any:
    return plan().attend(cache, Q, K, K, prefill=True, layout="BNTH", **options)


def traced(name: str) -> Any:
    def attend(value: Any) -> Any:
        return attend_layer(plan().init(2), **{name: value})[0]

    return jax.jit(attend)(0.5)


def consumed(tree: Any) -> Any:
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    return tree


def pages() -> Any:
    return paged_plan(plan())


def begun(cache: Any, prefill: Any = True, tokens: Any = 3) -> Any:
    return kvq.begin(cache, tokens, prefill=prefill)


def attended(*arrays: Any, prefill: Any = True, **options: Any) -> Any:
    return kvq.append_and_attend(begun(cache(), prefill), *arrays, **options)


def rebuilt(layer: int) -> Any:
    positions = jnp.zeros((2, 3), jnp.int32)
    inputs = kvq.types.LayerInputs(None, None, Q, None, K, K, positions, positions == 0, None)
    return kvq.cache.roundtrip_layer(SPEC, inputs, layer=layer)


def roundtrip(k: Any = K, v: Any = K, **options: Any) -> Any:
    return kvq.roundtrip(SPEC, k, v, layout="BNTH", **options)


FILE = pathlib.Path("never-written")
OF_A_LAYER = "takes a cache of kvq.init_cache, got LayerCache; its plan attends, appends, reads and"
MISTAKES = [
    *(
        (call, OF_A_LAYER)
        for call in (
            lambda: begun(plan().init(2)),
            lambda: kvq.rows.trim(plan().init(2), [1, 1]),
            lambda: kvq.rows.select(plan().init(2), [0]),
            lambda: kvq.rows.repeat(plan().init(2), 2),
            lambda: kvq.rows.merge(cache(), plan().init(2)),
            lambda: kvq.rows.replace(cache(), 0, plan().init(2)),
            lambda: kvq.rows.move(plan().init(2), None),
            lambda: kvq.files.save(plan().init(2), FILE),
            lambda: kvq.files.seal(plan().init(2)),
            lambda: kvq.size.quantized_tokens(plan().init(2), 3),
            lambda: kvq.size.dropped_outliers(plan().init(2)),
            lambda: kvq.size.components(plan().init(2)),
            lambda: kvq.size.unmet_options(plan().init(2)),
        )
    ),
    *(
        (call, "this is the layout of a cache, which has no arrays: kvq.init_cache, or a plan's in")
        for call in (
            lambda: begun(kvq.cache.layout(SPEC, DIMS, 2, 16, "float32")),
            lambda: kvq.rows.trim(kvq.cache.layout(SPEC, DIMS, 2, 16), [1, 1]),
            lambda: kvq.rows.select(kvq.cache.axes(SPEC, DIMS, 2, 16), [1, 1]),
            lambda: attend_layer(jax.eval_shape(lambda: plan().init(2))),
        )
    ),
    *(
        (lambda name=name: traced(name), f"{name} is static: {remedy}")
        for name, remedy in (
            ("scale", "multiply q by it instead"),
            ("lse", "give True or False"),
            ("soft_cap", "give a number of Python"),
        )
    ),
    (
        lambda: jax.jit(lambda cache: kvq.files.save(cache, FILE))(cache()),
        "this cache is traced: return it from the jitted function, and save that",
    ),
    (
        lambda: kvq.types.rotate(K, jnp.zeros((2, 2), int), kvq.types.Rope(INVERSE, 1.0)),
        "rows [B, N, T, H] and positions [B, T] or [1, T] must fit, got [2, 2, 3, 32] and [2, 2]",
    ),
    (
        lambda: kvq.types.rotate(K[0], jnp.zeros((1, 3), int), kvq.types.Rope(INVERSE, 1.0)),
        "must fit, got [2, 3, 32] and [1, 3]",
    ),
    (
        lambda: kvq.types.rotate(K, jnp.zeros(3, int), kvq.types.Rope(INVERSE, 1.0)),
        "must fit, got [2, 2, 3, 32] and [3]",
    ),
    (
        lambda: plan().trim(cache(), [1, 1]),
        "a plan takes the LayerCache that its init makes, got Cache",
    ),
    (lambda: plan().trim(plan().init(2), [1]), "lengths must be [2], got shape (1,)"),
    (lambda: plan().trim(plan().init(2), [1, -1]), "lengths must be at least 0, got [1, -1]"),
    (lambda: copy.deepcopy(consumed(plan().init(2))), "this cache was consumed by a call that"),
    (lambda: begun(begun(cache())), "got Step; kvq.finish(step) returns the cache"),
    (lambda: kvq.append_and_attend(cache(), Q, K, K), "the step of kvq.begin, got Cache"),
    (lambda: kvq.finish(cache()), "the step of kvq.begin, got Cache"),
    (lambda: begun(cache(), tokens=jnp.ones((2, 80))), "one integer, got an array [2, 80]"),
    (
        lambda: jax.jit(lambda tokens: begun(cache(), tokens=tokens))(3),
        "tokens must be an integer that is known when a program is traced",
    ),
    (
        lambda: jax.jit(lambda prefill: attended(Q, K, K, prefill=prefill))(True),
        "prefill is traced: name it in the static_argnames",
    ),
    (lambda: attended(*(a.swapaxes(1, 2) for a in (Q, K, K))), "swap axes 1 and 2"),
    (
        lambda: plan().attend(plan().init(2), Q, K, K, prefill=True, layout="BTNH"),
        'swap axes 1 and 2, or give layout="BNTH"',
    ),
    (
        lambda: attended(Q, K, K, rope=(INVERSE, 1.0)),
        "rope must be kvq.types.Rope(inverse_frequencies, attention_factor), got tuple",
    ),
    (
        lambda: kvq.types.rotate(Q, jnp.zeros((1, 3), int), kvq.types.Rope(jnp.ones(32), 1.0)),
        "rows of 32 channels have 16 inverse frequencies in a Rope, got 32",
    ),
    (lambda: kvq.parse(None), "a cache is a text such as 'kivi:bits=2', got NoneType"),
    (lambda: kvq.init_cache(DIMS, SPEC, 2, 16), "a cache is a text such as 'kivi:bits=2', got Ca"),
    (lambda: kvq.Kivi(bits=[4, 2]), "kivi:bits=[4, 2] must be one value; a text such as '4@0-1/2'"),
    (
        lambda: kvq.init_cache(SPEC, DIMS, 2, 16, placement="cpu"),
        "placement must be a kvq.Placement(mesh, ...) or None, got str",
    ),
    (
        lambda: kvq.layer_plan(SPEC, DIMS, layer=0, capacity=8, placement=jax.make_mesh((1,), "x")),
        "placement must be a kvq.Placement(mesh, ...) or None, got Mesh",
    ),
    (lambda: kvq.Placement("cpu"), "mesh must be a jax.sharding.Mesh"),
    (
        lambda: kvq.layer_plan(SPEC, DIMS, layer=0, capacity=8, attention="causal"),
        "attention must be a kvq.Attention for each layer, got str",
    ),
    (lambda: attended(Q, K, K, prefill="no"), "prefill='no' must be True for a prompt or False"),
    (
        lambda: plan().attend(plan().init(2), Q, K, K, prefill=None, layout="BNTH"),
        "prefill=None must be True for a prompt or False",
    ),
    (
        lambda: kvq.layer_plan(SPEC, DIMS, layer="0", capacity=8),
        "layer='0', but the model has layers 0 to 1",
    ),
    (
        lambda: kvq.layer_plan(SPEC, kvq.CacheDims("2", 4, 2, 32, 64), layer=0, capacity=8),
        "num_hidden_layers='2' must be an integer of at least 1",
    ),
    (lambda: roundtrip(layer=-1), "layer=-1 must be an integer of at least 0"),
    (lambda: roundtrip(layer="0"), "layer='0' must be an integer of at least 0"),
    (lambda: rebuilt(-1), "layer=-1 must be an integer from 0 to 4095"),
    (lambda: rebuilt(10**12), "layer=1000000000000 must be an integer from 0 to 4095"),
    (lambda: roundtrip(k=K.astype(int)), "k must hold floats, such as float32, got int32"),
    (lambda: roundtrip(v=K.astype(complex)), "v must hold floats, such as float32, got"),
    (
        lambda: kvq.CacheDims(2, 4, 2, 32, 64, attention=kvq.Attention(window=8)),
        "attention must be a kvq.Attention for each layer, got one: give (attention,) * num_hidd",
    ),
    (lambda: kvq.size.quantized_tokens(cache(), 1.5), "tokens=1.5 must be an integer of at least"),
    (lambda: kvq.size.quantized_tokens(cache(), -1), "tokens=-1 must be an integer of at least 0"),
    (lambda: kvq.files.seal(cache(), layers=0), "layers=0 must be a sequence of layers, such as"),
    (lambda: kvq.files.seal(cache(), layers="0"), "layers='0' must be a sequence of layers, such"),
    (lambda: kvq.files.seal(cache(), layers=[0.0]), "layers must be integers, got 0.0 of float64"),
    (lambda: kvq.files.seal(cache(), row="0"), "row must be integers, got 0 of str32"),
    (
        lambda: kvq.files.save(cache(), FILE, beside={"text": "a"}),
        "beside.text must be an array of numbers, got str32",
    ),
    (
        lambda: kvq.files.save(cache(), FILE, beside={1: np.zeros(2)}),
        "the names of beside must be text, got 1 of int",
    ),
    (
        lambda: kvq.files.save(cache(), FILE, model_fingerprint=None),
        "model_fingerprint must be the text of kvq.files.fingerprint, or '' for none, got NoneType",
    ),
    (
        lambda: kvq.files.save(cache(), FILE, parameters_fingerprint=7),
        "parameters_fingerprint must be the text of kvq.files.fingerprint, or '' for none, got int",
    ),
    (
        lambda: kvq.begin(cache(), 3, prefill=True, parameters=3),
        "parameters must be a sequence with an entry for each layer, got int",
    ),
    (
        lambda: kvq.rows.trim(cache(), [0, 0], parameters=3),
        "parameters must be a sequence with an entry for each layer, got int",
    ),
    (
        lambda: kvq.files.verify(kvq.rows.select(cache(), [0]), kvq.files.seal(cache())),
        "these seals are of another cache, or of one of its rows",
    ),
    (
        lambda: kvq.files.verify(cache(), kvq.files.seal(cache(), row=0)),
        "these seals are of another cache, or of one of its rows",
    ),
    (
        lambda: kvq.parameters.prepare("kvquant", DIMS, 0, calibrated=[1]),
        "calibrated must be what kvq.parameters.calibrate returns for one layer, got list",
    ),
    (
        lambda: kvq.parameters.prepare("xquant", DIMS, 0, weights={"k": 1}),
        "k_kernel must be [D, K * H] = [64, 64], got NoneType",
    ),
    (
        lambda: kvq.parameters.calibrate("kvquant", DIMS, 0, {"k": K, "v": K}, None),
        "give rows['k'] and gradients['k']",
    ),
    (lambda: begun(cache(), tokens="2"), "tokens='2' must be an integer of at least 1"),
    (
        lambda: kvq.layer_plan(SPEC, DIMS, layer=0, capacity=8, placement=[]),
        "placement must be a kvq.Placement(mesh, ...) or None, got list",
    ),
    (
        lambda: begun(cache(), prefill=jnp.array(True)),
        "prefill is an array: give True for a prompt or False",
    ),
    (lambda: begun(cache(), prefill=None), "prefill=None must be True for a prompt or False"),
    (
        lambda: kvq.begin(cache(), 3, prefill=True, implementation="gpu"),
        "implementation='gpu': choose 'xla', 'pallas' or 'native'",
    ),
    (
        lambda: plan().append(plan().init(2), K.astype(int), K, layout="BNTH"),
        "k must hold floats, such as float32, got int32",
    ),
    (lambda: plan().positions("x", 3), "a plan takes the LayerCache that its init makes, got str"),
    (lambda: kvq.files.seal(cache(), row=[0, 0]), "row must be the number of one row, got an arr"),
    (
        lambda: kvq.files.verify(cache(), None),
        "seals must be what kvq.files.seal returns, got NoneType",
    ),
    (lambda: pages().init(-1, 1), "pages=-1 must be an integer of at least 1"),
    (lambda: pages().init("a", 1), "pages='a' must be an integer of at least 1"),
    (lambda: pages().init(0, 1), "pages=0 must be an integer of at least 1"),
    (lambda: pages().init(1, 0), "slots=0 must be an integer of at least 1"),
    (lambda: pages().blocks("a"), "tokens='a' must be an integer of at least 0"),
    (
        lambda: pages().attend(pages().init(1, 1), [[0]], Q, K, K, implementation="native"),
        "implementation='native' reads no pages: leave it out",
    ),
    (lambda: pages().read("x", [[0]]), "takes the PagedCache of PagedPlan.init, got str"),
    (lambda: pages().fork(cache(), 0, 1), "takes the PagedCache of PagedPlan.init, got Cache"),
    (lambda: kvq.Kivi(skip_layers=1.5), "skip_layers=1.5 must be layers, such as (0, 1)"),
    (lambda: kvq.Kivi(skip_layers=[0, "a"]), "skip_layers=[0, 'a'] must be layers, such as (0, 1)"),
    (lambda: kvq.Kivi(bits=""), "'bits=' is not option=value"),
    (
        lambda: kvq.CacheDims(1, 4, 2, 32, 64, layer_heads=((1, 2, 3),)),
        "layer_heads must be (K, H) for each layer, got (1, 2, 3) for one",
    ),
    (
        lambda: kvq.CacheDims(1, 4, 2, 32, 64, layer_heads=(3,)),
        "layer_heads must be (K, H) for each layer, got 3 for one",
    ),
    (
        lambda: kvq.CacheDims(1, 4, 2, 32, 64, attention=None),
        "attention must have an entry for each layer, or none, got NoneType",
    ),
    (
        lambda: kvq.parameters.prepare("kvquant", DIMS, 0, calibrated={"k": [1]}),
        "calibrated['k'] must be arrays by name, got list",
    ),
    (
        lambda: kvq.parameters.calibrate("kvquant", DIMS, 0, np.ones((1, 2, 3, 32)), {}),
        "rows must be arrays by side, 'k' and 'v', got ndarray",
    ),
]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_pass(call: Any, message: str):
    end = r"(\Z|\n-+\n)"  # JAX adds lines about its own frames to what is raised in a trace
    with pytest.raises(ValueError, match=rf"\A.*{re.escape(message)}.*{end}"):
        call()


def test_caches_are_compared_as_objects():
    """The fields' arrays have no truth value."""
    for one in (cache(), plan().init(2), begun(cache())):
        assert one == one
        assert one != copy.deepcopy(one)


def test_rows_of_either_layout_are_rotated_alike():
    rows, positions = jax.random.normal(jax.random.key(0), (2, 3, 3, 32)), jnp.arange(6) % 5
    rope = kvq.types.Rope(INVERSE * 0.3, jnp.ones(()))
    heads_first = kvq.types.rotate(rows, positions.reshape(2, 3), rope)
    turned = jnp.swapaxes(rows, 1, 2)
    tokens_first = kvq.types.rotate(turned, positions.reshape(2, 3), rope, layout="BTNH")
    np.testing.assert_array_equal(jnp.swapaxes(tokens_first, 1, 2), heads_first)
    other = kvq.types.rotate(turned, positions.reshape(2, 3), rope)
    assert (jnp.swapaxes(other, 1, 2) != heads_first).any(), "the layout does nothing"


@pytest.mark.usefixtures("types_unchecked")
def test_a_count_of_tokens_is_an_int_of_python():
    for tokens in (np.int64(16), jnp.int32(16)):
        counted = kvq.size.quantized_tokens(cache(), tokens)
        assert (type(counted), counted) == (int, 8)


def test_tokens_past_the_capacity_are_not_counted():
    assert kvq.size.quantized_tokens(cache(), 10**9) == kvq.size.quantized_tokens(cache(), 16)


@pytest.mark.usefixtures("types_unchecked")
def test_numbers_of_python_and_numpy_make_a_rotation_and_a_spec():
    rows, positions = jax.random.normal(jax.random.key(0), Q.shape), jnp.arange(3)[None]
    arrays = kvq.types.Rope(INVERSE, jnp.full((), 2.0))
    for rope in (kvq.types.Rope(np.ones(16), 2), kvq.types.Rope([1.0] * 16, 2.0)):
        same = kvq.types.rotate(rows, positions, rope) == kvq.types.rotate(rows, positions, arrays)
        assert same.all()
        assert (rope.scaled(rows) == 2 * rows).all()
    for layers in (0, [0], (0,), "0", np.int64(0), [np.int64(0)]):
        assert kvq.Kivi(skip_layers=layers) == kvq.parse("kivi:skip_layers=0")
