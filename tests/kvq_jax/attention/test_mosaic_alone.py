"""Decode steps without Pallas' Triton route: which methods run on Mosaic GPU alone with their
default options, and that their steps are those of XLA. Interpreted, with a detector of races."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch, fused
from kvq_jax.attention.dispatch import XLA, Route
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.layer.plan import LayerState, by_side
from kvq_jax.methods.registry import METHODS
from pallas_kernels.launch import Launch
from tests.compile_options import QUICK_COMPILE
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import parameters_of, row_errors, sequences
from tests.pallas_kernels.lowering import needs_mosaic

pytestmark = needs_mosaic

CAPACITY = 416  # so that a body holds a tile of 256 tokens
HEADS = 4  # two for each KV head: scales may be one head's, or all heads'
DIMS = CacheDims(
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    head_dim=64,
    hidden_size=128,
)
BEFORE = np.array([254, 100], np.int32)  # two tokens before a block leaves, and anywhere
STEPS = 3

# all methods that kernels serve
ON_MOSAIC = (
    *("dense", "kivi", "innerq", "kvquant", "polarquant", "squat", "squat_pre"),
    *("turboquant", "waterfill", "int2", "int3", "int4", "int8", "nf2", "nf3", "nf4"),
)
EIGEN = "waterfill:key_basis=eigen"  # keys that Triton's kernels do not read

# Keys and values in different forms, and a ring that does not hold whole spans.
COMBINED = (
    "k=polarquant+v=nf4",
    "k=kvquant+v=kivi:bits=4",
    "k=kivi+v=kvquant",
    "kvquant:recent=30",
)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    dispatch.no_triton.cache_clear()
    yield
    dispatch.no_triton.cache_clear()


@pytest.mark.usefixtures("without_triton")
def test_every_method_that_kernels_serve_does_without_triton():
    plans = {name: plan for name in METHODS if (plan := plan_of(name)) is not None}
    reasons = {
        name: dispatch.unsupported(plan, HEADS, 1)
        for name, plan in plans.items()
        if not any(isinstance(codec.kernels.reader(), str) for codec in plan.codecs)
    }
    assert reasons == dict.fromkeys(ON_MOSAIC)


def plan_of(name: str):
    if name == "xquant_cl":  # starts at a later layer
        return None
    return kvq.cache.layout(name, DIMS, 1, CAPACITY, "bfloat16").plans[0]


prefill = jax.jit(
    prefill_layer, static_argnums=0, static_argnames="route", compiler_options=QUICK_COMPILE
)


Step = tuple[jax.Array, LayerState]  # an output, and the state after it


def steps(name: str, by: Route) -> Iterator[tuple[Step, Step]]:
    """Yield each step by this route and by XLA, both from the state that XLA left: a code of a tie
    that one of them rounds the other way is not an error of the next step.
    """
    tokens = sequences(len(BEFORE), DIMS, CAPACITY, dtype="bfloat16")
    cache = kvq.init_cache(name, DIMS, len(BEFORE), CAPACITY, "bfloat16")
    plan, state, lengths = cache.plans[0], cache.layers[0], BEFORE
    params = parameters_of(plan)
    prompt = tokens.window(np.zeros_like(lengths), lengths, CAPACITY)
    _, state, _ = prefill(plan, params, state, prompt, (), route=XLA)
    decode = jax.jit(
        decode_layer, static_argnums=0, static_argnames="route", compiler_options=QUICK_COMPILE
    )
    for _ in range(STEPS):
        new = tokens.window(lengths, lengths + 1, 1)
        step, wanted = (decode(plan, params, state, new, (), route=r)[:2] for r in (by, XLA))
        yield step, wanted
        lengths, state = lengths + 1, wanted[1]


def branches(jaxpr: Any) -> int:
    """Count the branches of XLA, which are those outside of kernels. Choices between platforms are
    made before XLA."""
    count = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in ("pallas_call", "mpmd_map"):
            continue
        count += name == "cond" and params.get("branches_platforms") is None
        for value in params.values():
            inner = value if isinstance(value, (tuple, list)) else [value]
            closed = (getattr(one, "jaxpr", one) for one in inner)
            count += sum(branches(one) for one in closed if hasattr(one, "eqns"))
    return count


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("name", [*ON_MOSAIC, *COMBINED])
def test_xla_writes_no_block_that_triton_writes(name: str):
    plan = plan_of(name)
    by = dispatch.choose(Launch(interpret=True, route="mosaic"), plan, HEADS, 1)
    cache = kvq.init_cache(name, DIMS, len(BEFORE), CAPACITY, "bfloat16")
    new = sequences(len(BEFORE), DIMS, CAPACITY, dtype="bfloat16").window(BEFORE, BEFORE + 1, 1)
    params, state = parameters_of(plan), cache.layers[0]

    def step(params, state, new):
        return decode_layer(plan, params, state, new, (), route=by)

    of_sides = zip(plan.codecs, by_side(params), state.stats, strict=True)
    by_xla = [
        codec
        for codec, side_params, stats in of_sides
        if not fused.leaves_at_once(plan, codec)
        and fused.block_writer(plan, codec, side_params, stats, Launch()) is None
    ]
    # XLA writes the blocks of a side under a branch.
    found = branches(jax.make_jaxpr(step)(params, state, new).jaxpr)
    assert found == len(by_xla), f"{found} branches, Triton leaves {len(by_xla)} sides to XLA"
    if name == "waterfill":
        assert found == 2, "branches are not counted"


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize(
    "name", some((*ON_MOSAIC, *COMBINED, EIGEN), ["int4", "k=polarquant+v=nf4", EIGEN])
)
def test_steps_are_those_of_xla(name: str):
    compare(name, Launch(interpret=True, route="mosaic"))


@pytest.mark.usefixtures("without_triton")
def test_a_row_with_one_head_has_fewer_pieces_than_the_merge_has_warps():
    dims = dataclasses.replace(DIMS, num_key_value_heads=1)
    cache = kvq.init_cache("kivi:bits=4", dims, 1, 384, "bfloat16")
    plan, tokens = cache.plans[0], sequences(1, dims, 384, dtype="bfloat16")
    none, lengths = np.zeros(1, np.int32), np.full(1, 300, np.int32)
    _, state, _ = prefill(plan, (), cache.layers[0], tokens.window(none, lengths, 384), ())
    new, by = tokens.window(lengths, lengths + 1, 1), Launch(interpret=True, route="mosaic")
    output, wanted = (
        decode_layer(plan, (), state, new, (), route=dispatch.choose(route, plan, HEADS, 1))[0]
        for route in (by, "xla")
    )
    assert row_errors(output, wanted).max() < 1e-2
    assert row_errors(output[:, ::-1], wanted).max() > 0.1, "other heads would pass"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU in this process")
@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("name", [*ON_MOSAIC, *COMBINED, EIGEN])
def test_steps_on_a_gpu_are_those_of_xla(name: str):
    compare(name, Launch(route="mosaic"))


def compare(name: str, launch: Launch) -> None:
    plan = plan_of(name)
    by = dispatch.choose(launch, plan, HEADS, 1)
    body = plan.regions.aged_tokens
    assert body(int(BEFORE[0]) + STEPS) > body(int(BEFORE[0])) > 0, "no block leaves a window"
    previous = None
    for number, ((output, state), (wanted, expected)) in enumerate(steps(name, by)):
        error = row_errors(output, wanted).max()
        assert error < 1e-2, f"step {number}: {error:.1e}"
        if previous is not None:
            assert row_errors(previous, wanted).max() > 0.1, "another step's output would pass"
        previous = output
        leaves = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        for path, (one, other) in enumerate(leaves):
            share = np.count_nonzero(np.asarray(one) != np.asarray(other)) / max(one.size, 1)
            assert share <= 1e-3, f"array {path} after step {number}: {share:.1e} of {one.shape}"


def test_keys_in_an_eigenbasis_are_mosaics_alone():
    plan = plan_of(EIGEN)
    assert dispatch.unsupported(plan, HEADS, 1) is None
    with pytest.raises(ValueError, match="k: Triton's kernels do not turn keys back"):
        dispatch.choose(Launch(interpret=True), plan, HEADS, 1)
    assert dispatch.choose(Launch(interpret=True), plan_of("waterfill"), HEADS, 1).launch


@pytest.mark.usefixtures("without_triton")
def test_the_other_route_is_refused():
    with pytest.raises(ValueError, match="no kernel for this cache: kernels need"):
        dispatch.choose(Launch(interpret=True), plan_of("kivi"), HEADS, 1)
