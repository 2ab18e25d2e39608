"""The cache of one layer on a mesh: placed by a plan, or split by a host's own shard_map."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvq_jax as kvq
from kvq_jax.cache import layer_step

SPEC = "kivi:bits=4,sink=0,recent=16,block=16,group_size=16"
DIMS, REAL = kvq.CacheDims(1, 4, 2, 32, 128), [60, 41]


def plan_of(dims: kvq.CacheDims = DIMS, **options: Any) -> kvq.cache.CachePlan:
    return kvq.layer_plan(SPEC, dims, layer=0, capacity=96, dtype="float32", **options)


def arrays(tokens: slice) -> list[jax.Array]:
    whole = (jax.random.normal(jax.random.key(i), (2, 61, n, 32)) for i, n in enumerate((4, 2, 2)))
    return [a[:, tokens] for a in whole]


def prompt_and_token(plan: kvq.cache.CachePlan, cache: Any, prompt: Any, token: Any) -> Any:
    """Return the attention of a prompt that is padded on the left, and of one token more."""
    first, cache = plan.attend(
        cache, *prompt, lengths=jnp.array(REAL), padding="left", prefill=True
    )
    second, cache = plan.attend(cache, *token, prefill=False)
    return jnp.concatenate([first[:, -1:], second], axis=1), cache


def both(sharding: NamedSharding | None = None) -> Any:
    """Return the arrays of the prompt and of the token."""
    return jax.device_put([arrays(slice(0, 60)), arrays(slice(60, 61))], sharding)


def mesh_of(kind: AxisType, *names: str) -> Any:
    shape, devices = (2, 2), jax.devices()[:4]
    return jax.make_mesh(shape, names or ("data", "kv"), (kind,) * 2, devices=devices)


@pytest.fixture(scope="module")
def of_one_device() -> np.ndarray:
    plan = plan_of()
    out, _ = prompt_and_token(plan, plan.init(2), *both())
    return np.asarray(out)


def check(out: Any, expected: np.ndarray) -> None:
    assert np.abs(np.asarray(out) - expected).max() < 1e-5
    assert np.abs(np.asarray(out)[::-1] - expected).max() > 0.1, "the other row's would pass"


def test_a_prompt_is_appended_without_attention_on_shards(monkeypatch: pytest.MonkeyPatch):
    """Its program has none of the softmax's exponentials, which attention has."""
    on_shards, called = layer_step._on_shards, []
    monkeypatch.setattr(
        layer_step, "_on_shards", lambda *args: (called.append(args), on_shards(*args))[1]
    )
    plan = plan_of(placement=kvq.Placement(mesh_of(AxisType.Auto, "data", "kv"), heads="kv"))
    cache, (q, k, v) = plan.init(2), arrays(slice(0, 60))
    plan.append(cache, k, v)
    plan.attend(cache, q, k, v, prefill=True)
    appended, attended = (
        on_shards.lower(*args).compile().as_text().count("exponential(") for args in called
    )
    assert appended == 0
    assert attended, "attention would pass"


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_placed_layer_is_the_layer_of_one_device(kind: str, of_one_device: np.ndarray):
    mesh = mesh_of(getattr(AxisType, kind), "kv", "body")
    plan = plan_of(placement=kvq.Placement(mesh, heads="kv", tokens="body"))
    given = both(NamedSharding(mesh, P(None, None, "kv")))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda cache, *given: prompt_and_token(plan, cache, *given))
        out, cache = run(plan.init(2), *given)
    check(out, of_one_device)
    assert cache.lengths.tolist() == [61, 42]
    with pytest.raises(ValueError, match="dealt out to the devices of a mesh"):
        plan.read(cache)


def test_arrays_on_a_mesh_with_automatic_axes_need_no_placement(of_one_device: np.ndarray):
    plan, mesh = plan_of(), mesh_of(AxisType.Auto)
    given = both(NamedSharding(mesh, P("data", None, "kv")))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *given: prompt_and_token(plan, plan.init(2), *given)[0])
        check(run(*given), of_one_device)


def test_arrays_that_explicit_axes_split_need_a_placement():
    plan, mesh = plan_of(), mesh_of(AxisType.Explicit)
    cache = kvq.init_cache(SPEC, DIMS, 2, 96, "float32")
    split = NamedSharding(mesh, P("data", None, "kv"))
    q, k, v = jax.device_put(arrays(slice(60, 61)), split)
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (q, k, v)]
    told = r"^q is split over \['data', 'kv'\] .*: give layer_plan or init_cache"
    refused = pytest.raises(ValueError, match=told)
    with refused:
        plan.attend(plan.init(2), q, k, v, prefill=True)
    with jax.set_mesh(mesh), refused:
        jax.eval_shape(lambda *qkv: plan.attend(plan.init(2), *qkv, prefill=True), q, k, v)
    with refused:
        kvq.append_and_attend(kvq.begin(cache, 1, prefill=False), *heads_first)


def test_a_cache_that_explicit_axes_split_needs_a_placement():
    """It ended in JAX's own ShardingTypeError, in the middle of a step."""
    plan, mesh = plan_of(), mesh_of(AxisType.Explicit)
    split = NamedSharding(mesh, P("data"))
    whole = jax.device_put(kvq.init_cache(SPEC, DIMS, 2, 96, "float32"), split)
    cache = jax.device_put(plan.init(2), split)
    q, k, v = arrays(slice(60, 61))
    for call in (
        lambda: plan.attend(cache, q, k, v, prefill=True),
        lambda: plan.append(cache, k, v),
        lambda: plan.read(cache),
        lambda: plan.trim(cache, [0, 0]),
        lambda: kvq.begin(whole, 1, prefill=False),
        lambda: kvq.rows.trim(whole, [0, 0]),
        lambda: kvq.rows.select(whole, [0, 1]),
        lambda: kvq.rows.merge(whole, whole),
    ):
        with pytest.raises(
            ValueError, match=r"\Athe cache is split over \['data'\] of .*: give la"
        ):
            call()
    moved = kvq.rows.move(whole, None)
    kvq.begin(moved, 1, prefill=False)


def test_a_placed_layer_is_trimmed_as_on_one_device():
    prompt, kept = arrays(slice(0, 60)), np.array([50, 7])
    alone = plan_of()
    expected = alone.trim(alone.append(alone.init(2), *prompt[1:]), kept)
    plan = plan_of(placement=kvq.Placement(mesh_of(AxisType.Explicit), rows="data", heads="kv"))
    found = plan.trim(plan.append(plan.init(2), *prompt[1:]), kept)
    assert found.lengths.tolist() == [50, 7]
    for one, other in zip(plan.read(found), alone.read(expected), strict=True):
        for b, length in enumerate(kept):
            np.testing.assert_allclose(one[b, :length], other[b, :length], atol=1e-5)
    assert tuple(found.state.ring[0].sharding.spec)[:2] == ("data", "kv")


@pytest.mark.parametrize("split", [P("data", None, "kv"), P(None, None, "kv")], ids=str)
def test_rows_on_an_explicit_mesh_are_sent_through_a_cache_and_back(split: P):
    k, v = arrays(slice(0, 60))[1:]
    expected = kvq.roundtrip(SPEC, k, v, layout="BTNH")
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put((k, v), NamedSharding(mesh, split))
        run = jax.jit(lambda k, v: kvq.roundtrip(SPEC, k, v, layout="BTNH"))
        for rows, same in zip(run(*placed), expected, strict=True):
            np.testing.assert_allclose(rows, same, atol=1e-6)
            assert jax.typeof(rows).sharding.spec[: len(split)] == tuple(split)
    assert np.abs(np.asarray(expected[0]) - k).max() > 1e-3, "nothing is quantized"


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_hosts_shard_map_takes_a_plan_of_its_own_heads(kind: str, of_one_device: np.ndarray):
    types = (getattr(AxisType, kind),)
    mesh = jax.make_mesh((2,), ("kv",), axis_types=types, devices=jax.devices()[:2])
    plan = plan_of(kvq.CacheDims(1, 2, 1, 32, 128))  # of one shard

    def local(prompt: Any, token: Any) -> jax.Array:
        return prompt_and_token(plan, plan.init(2), prompt, token)[0]

    split = P(None, None, "kv")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    given = both(NamedSharding(mesh, split))
    with jax.set_mesh(mesh):
        check(jax.jit(mapped)(*given), of_one_device)
        checked = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
        with pytest.raises(NotImplementedError, match=r"q varies over \['kv'\] .*check_vma=False"):
            jax.eval_shape(checked, *given)
