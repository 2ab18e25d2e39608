"""Layers of every method on a mesh: the same cache bit for bit, the same attention to rounding, and
nothing of a cache's size moves."""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.methods.registry import METHODS
from kvq_jax.placement.allowed import parse, unsplittable
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.multi_device.placed_runs import (
    BATCH,
    CAPACITY,
    CROSS_LAYER,
    INNERQ,
    KIVI,
    SPECS,
    as_far_as_allowed,
    bytes_on,
    collectives,
    differing,
    dims_of,
    on,
    on_one_device,
    parameters_for,
    program,
    quick_jit,
    run,
    speaks_of_devices,
    specs,
    standing,
    step_of_layers,
    texts,
)
from tests.pallas_kernels.lowering import cuda_lowering

EACH_WAY = ("rows=2", "heads=2", "tokens=3")  # one of 3 shards holds a block more than the others


def check(spec: str, mesh: str) -> None:
    one, placed = on_one_device(spec), on(spec, mesh)
    wrong = differing(one.cache, kvq.rows.move(placed.cache, None))
    assert not wrong, f"{spec} on {mesh}: {wrong}"
    error = np.abs(placed.outputs - one.outputs).max() / np.abs(one.outputs).max()
    assert error <= 1e-6 * (10 if "xquant" in spec else 1), (
        f"{spec} on {mesh}: attention differs by {error:.1e}"
    )
    assert np.abs(np.roll(placed.outputs, 1, axis=3) - one.outputs).max() > 1e-2, (
        "attention of other tokens would pass"
    )


@specs()
def test_a_method_on_a_mesh_is_the_method(spec: str):
    check(spec, as_far_as_allowed(spec))


@specs()
def test_programs_of_one_device_know_of_no_mesh(spec: str):
    """Nothing of this package shows in them; the same functions, with a placement, are full of
    it."""
    assert not speaks_of_devices(on_one_device(spec).lowered), spec
    assert speaks_of_devices(on(spec, as_far_as_allowed(spec)).lowered), (
        "a program on shards would pass for one of a single device"
    )


def test_every_method_is_placed():
    """Those that differ in bits alone, such as int2 and int4, count as one."""
    named = {
        method.rstrip("0123456789")
        for spec in SPECS
        for method in re.findall(r"(?:^|k=|v=)([a-z]\w+)", spec)
    }
    missing = {name for name in METHODS if name.rstrip("0123456789") not in named}
    assert not missing, f"no cache of SPECS has {missing}"


@pytest.mark.parametrize("mesh", EACH_WAY)
def test_every_way_of_splitting_is_right_by_itself(mesh: str):
    check(KIVI, mesh)


@specs()
def test_no_collective_of_a_step_is_larger_than_one_token(spec: str):
    dims = dims_of(spec)
    maximum = (
        max(BATCH * dims.hidden_size, BATCH * dims.num_attention_heads * (dims.head_dim + 1)) * 4
    )
    placed = on(spec, as_far_as_allowed(spec))
    found = collectives(placed.step)
    assert {"all-reduce"} == {kind for _, kind in found}, (
        "a maximum and a sum; compilers join those of several layers"
    )
    assert max(found)[0] <= maximum, f"{spec}: {max(found)}, more than {maximum} bytes"
    largest = max(
        leaf.nbytes // 4 for leaf in jax.tree.leaves([layer.body for layer in placed.cache.layers])
    )
    assert largest > maximum // 8, "the cache is so small that gathering it would pass"


@pytest.mark.parametrize("mesh", ["rows=2", "heads=2"])
def test_rows_and_heads_alone_need_no_collective(mesh: str):
    assert not collectives(on(KIVI, mesh).step)


@specs()
def test_shards_speak_of_one_token_at_any_capacity_and_only_where_tokens_are_split(spec: str):
    """What a step runs on each shard, as it is traced: of a method's own collectives, those that
    merge shards of tokens are all."""

    def spoken(mesh: str, capacity: int = CAPACITY) -> list[tuple[int, str]]:
        cache = kvq.cache.layout(spec, dims_of(spec), BATCH, capacity, "float32", parse(mesh))
        inputs = texts(32).window(np.zeros(BATCH, np.int32), np.ones(BATCH, np.int32), 1)
        traced = str(program("xla").trace(cache, inputs, parameters_for(spec), prefill=False).jaxpr)
        found = re.findall(
            r"\[([\d,]*)\] = (psum|pmax|pmin|all_gather|all_to_all|ppermute|reduce_scatter)\w*\[",
            traced,
        )
        return sorted((4 * math.prod(map(int, shape.split(","))), name) for shape, name in found)

    plans = kvq.cache.layout(spec, dims_of(spec), BATCH, CAPACITY, "float32").plans
    alone = "rows=2" if any(unsplittable(plan, 2) for plan in plans) else "rows=2,heads=2"
    assert not spoken(alone)
    dims, found = dims_of(spec), spoken("tokens=4")
    merged = BATCH * dims.num_attention_heads * 4
    assert found == sorted([(merged, "pmax"), (merged * (dims.head_dim + 1), "psum")] * len(plans))
    assert spoken("tokens=4", 16 * CAPACITY) == found


@specs()
def test_each_device_holds_its_share_and_a_donated_cache_is_updated_in_place(spec: str):
    placed = on(spec, as_far_as_allowed(spec))
    cache = placed.cache
    share = cache.placement.shard_nbytes(cache.axes.layers) + cache.lengths.nbytes
    for device in cache.placement.mesh.devices.flat:
        held = bytes_on(device, cache)
        assert held == share, f"{device} holds {held} bytes, the layout says {share}"
    assert placed.step.memory_analysis().alias_size_in_bytes >= 0.99 * share
    whole = kvq.cache.layout(spec, cache.dims, BATCH, CAPACITY, "float32")
    bodies, dealt = ([layer.body for layer in one.layers] for one in (whole, cache.axes))
    assert cache.placement.shard_nbytes(dealt) <= 0.5 * kvq.size.nbytes(bodies), "nothing is split"


@pytest.mark.parametrize("spec", [KIVI, CROSS_LAYER])
def test_trimmed_tokens_come_back_into_the_window_of_every_shard(spec: str):
    mesh = as_far_as_allowed(spec)
    one, placed = on_one_device(spec), on(spec, mesh)
    trim = quick_jit(kvq.rows.trim)
    for lengths in ([66, 30], [30, 0]):
        found, expected = (trim(r.cache, np.array(lengths), r.parameters) for r in (placed, one))
        # the spare codes of a cut block lie elsewhere on shards, and do not move
        wrong = differing(
            standing(expected),
            standing(kvq.rows.move(found, None)),
            tolerance=1e-6 if spec == CROSS_LAYER else 0,
        )
        assert not wrong, f"{spec} on {mesh}, trimmed to {lengths}: {wrong}"
    assert differing(one.cache.layers[0].ring, expected.layers[0].ring), (
        "a trim that brings nothing back would pass"
    )


def test_rows_are_selected_repeated_and_merged_across_devices():
    one, placed = on_one_device(KIVI).cache, on(KIVI, "rows=2").cache
    for operation in (
        lambda cache: kvq.rows.select(cache, [1, 0]),
        lambda cache: kvq.rows.repeat(cache, 2),
        lambda cache: kvq.rows.merge(cache, kvq.rows.select(cache, [1, 1])),
    ):
        found = operation(placed)
        assert not differing(operation(one), kvq.rows.move(found, None))
        split, before = (cache.layers[0].ring[0].sharding for cache in (found, placed))
        assert split.is_equivalent_to(before, 4)
    turned = kvq.rows.move(kvq.rows.select(placed, [1, 0]), None)
    assert differing(one, turned), "the order of rows would not be seen"


def test_a_file_is_loaded_under_another_placement(tmp_path: pathlib.Path):
    one = on_one_device(INNERQ).cache
    placed = kvq.rows.move(one, parse("heads=2,tokens=3"))
    for cache, name in ((one, "one"), (placed, "placed")):
        kvq.files.save(cache, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "placed").read_bytes()
    assert not differing(one, kvq.files.load(tmp_path / "placed"))
    for mesh in ("tokens=4", "rows=2"):
        loaded = kvq.files.load(tmp_path / "placed", placement=parse(mesh))
        moved = kvq.rows.move(one, parse(mesh))
        assert not differing(moved, loaded)
        split, wanted = (cache.layers[0].body[0].scale.sharding for cache in (loaded, moved))
        assert split.is_equivalent_to(wanted, 4)


def test_the_native_kernel_reads_each_shards_part():
    if reason := dispatch.no_device("native"):
        pytest.skip(reason)
    one, placed = on_one_device(KIVI), run(KIVI, parse("tokens=3"), "native")
    assert not differing(one.cache, kvq.rows.move(placed.cache, None))
    assert np.abs(placed.outputs - one.outputs).max() <= 1e-5 * np.abs(one.outputs).max()
    assert "custom-call" in placed.step.as_text(), "no kernel was called"
    assert "custom-call" not in on(KIVI, "tokens=3").step.as_text(), "XLA calls kernels, too"


ON_KERNELS = "kivi:pre_rope=true,recent=32,block=32", "kvquant:outliers=0.04,block=32"


@pytest.mark.parametrize("spec", some(ON_KERNELS, ON_KERNELS[:1]))
def test_gpu_kernels_read_and_write_each_shards_part(spec: str):
    """Interpreted: keys that are rotated where their blocks stand, outliers, and a block that
    leaves a window. The mesh gives the kernels other blocks in another order, and so other
    roundings of their fp16 products."""
    mesh = parse("tokens=2" if "kvquant" in spec else "heads=2,tokens=2")
    one, placed = (
        run(spec, where, Launch(interpret=True), head_dim=64, more=96) for where in (None, mesh)
    )
    assert not differing(one.cache, kvq.rows.move(placed.cache, None))
    assert np.abs(placed.outputs - one.outputs).max() <= 5e-4 * np.abs(one.outputs).max()
    assert np.abs(np.roll(placed.outputs, 1, axis=3) - one.outputs).max() > 1e-2, (
        "attention of other tokens would pass"
    )
    assert {kind for _, kind in collectives(placed.step)} == {"all-reduce"}


def test_gpu_kernels_on_shards_are_lowered_for_cuda():
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    gpus = jax.sharding.AbstractMesh((2, 2), ("heads", "tokens"), abstract_device=device)
    placement = kvq.Placement(gpus, heads="heads", tokens="tokens")
    cache = kvq.cache.layout(
        "kivi:recent=32,block=32", dims_of(KIVI, head_dim=64), BATCH, 160, "float32", placement
    )
    inputs = texts(64).window(np.zeros(BATCH, np.int32), np.ones(BATCH, np.int32), 1)
    with cuda_lowering():
        traced = jax.jit(step_of_layers(Launch()), static_argnames="prefill").trace(
            cache, inputs, (), prefill=False
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "decode_attention" in text, "no kernel"
    assert "append_token" in text, "a new token and the block that leaves take more than one launch"
    assert "manual" in text, "no shards"


@pytest.mark.parametrize(
    ("names", "split"), [("xy", ("x", "y")), ("xy", (None, None, "y")), ("ab", ("a", "b"))]
)
def test_an_explicit_mesh_may_split_new_tokens_in_any_way(names: str, split: tuple):
    """As tensor-parallel models hold them, in another way, and on a mesh with other names, there
    operation by operation, too, each of which is compiled."""
    dims = kvq.CacheDims(1, 4, 2, 32, 64)
    explicit = jax.make_mesh((2, 2), tuple(names), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    placement = kvq.Placement(mesh, rows="x", heads="y")
    shapes = ((2, heads, 100, 32) for heads in (4, 2, 2))
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    lengths = jnp.array([100, 80], jnp.int32)

    def step(cache, q, k, v):
        begun = kvq.begin(cache, q.shape[2], lengths, prefill=True)
        out, begun = kvq.append_and_attend(begun, q, k, v)
        return out, kvq.finish(begun)

    def new(placement=None):
        return kvq.init_cache("kivi:bits=4,recent=32", dims, 2, 128, "float32", placement=placement)

    wanted, alone = step(new(), *arrays)
    placed = jax.device_put(arrays, jax.sharding.NamedSharding(explicit, jax.P(*split)))
    with jax.set_mesh(explicit):
        for take in (jax.jit(step), step) if names == "ab" else (jax.jit(step),):
            out, cache = take(new(placement), *placed)
            np.testing.assert_allclose(np.asarray(out), wanted, atol=1e-5)
            assert not differing(kvq.rows.move(alone, None), kvq.rows.move(cache, None))
    assert np.abs(np.asarray(out)[:, ::-1] - wanted).max() > 0.1, "other heads would pass"
