"""GPU kernels, interpreted, take steps of layers with windows, soft caps, another scale and sinks
as XLA does, which tests hold to a masked layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention.dispatch import XLA, Route, unsupported
from kvq_jax.cache.update import decode_layer
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import LayerInputs
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route as mosaic
from tests.exhaustive import some
from tests.kvq_jax.attention.test_dispatch import DIMS, decode, prefill
from tests.kvq_jax.layer_runs import parameters_of, row_errors, sequences
from tests.pallas_kernels.lowering import lower_for_cuda

CAPACITY, HEADS = 700, DIMS.num_attention_heads
WINDOWED = Attention(window=150)
SPECIAL = Attention(window=150, scale=0.2, soft_cap=2.0, sinks=True)
CAPPED = Attention(scale=0.2, soft_cap=2.0)  # of Gemma 2's global layers
# nothing yet; a block leaves with the next token, in the first, the second and the third round of a
# ring of 192 tokens; no block leaves; the last token
LENGTHS = np.array([0, 127, 287, 543, 600, CAPACITY - 1], np.int32)
BELOW_FLOOR = 4  # the window of this row reaches below what its body holds after a trim
STEPS = 2
BY_TRITON = Route("pallas", Launch(interpret=True))
BY_MOSAIC = Route("pallas", Launch(interpret=True, route="mosaic"))
CASES = (
    ("kivi:bits=4", WINDOWED, BY_TRITON),
    ("kivi:bits=4,pre_rope=true", SPECIAL, BY_TRITON),
    ("kivi:bits=2,recent=256", SPECIAL, BY_TRITON),  # windows keep all that is inside
    ("innerq:bits=2", SPECIAL, BY_TRITON),
    ("innerq:bits=2", CAPPED, BY_TRITON),
    ("dense", WINDOWED, BY_TRITON),
    ("nf4", WINDOWED, BY_TRITON),
    ("k=polarquant:radius_bits=2,group_size=64+v=kivi:bits=4", SPECIAL, BY_TRITON),
    ("kivi:bits=4", SPECIAL, BY_MOSAIC),
    ("innerq:bits=2", WINDOWED, BY_MOSAIC),
    ("kivi:bits=4,pre_rope=true", SPECIAL, BY_MOSAIC),
    ("k=polarquant:radius_bits=2,group_size=64+v=kivi:bits=4", SPECIAL, BY_MOSAIC),
)
ON_GPUS = [
    pytest.param(spec, attention, Route("pallas", launch), marks=pytest.mark.gpu)
    for spec, attention, route in CASES
    for launch in (
        (Launch("jnp"), Launch("asm")) if route is BY_TRITON else (Launch(route="mosaic"),)
    )
]
USUAL = (CASES[1], CASES[5], CASES[8], CASES[10])


def layer(spec: str, attention: Attention) -> tuple[LayerPlan, LayerState]:
    dims = dataclasses.replace(DIMS, attention=(attention,))
    cache = kvq.init_cache(spec, dims, len(LENGTHS), CAPACITY, "bfloat16")
    return cache.plans[0], cache.layers[0]


def inputs(plan: LayerPlan, start: np.ndarray, stop: np.ndarray, count: int) -> LayerInputs:
    tokens = sequences(len(LENGTHS), DIMS, CAPACITY, dtype="bfloat16")
    new = tokens.window(start, np.minimum(stop, CAPACITY), count)
    sinks = jnp.linspace(-1, 3, HEADS) if plan.attention.sinks else None
    return dataclasses.replace(new, sinks=sinks)


@functools.cache
def prompted(spec: str, attention: Attention) -> tuple[LayerPlan, LayerState]:
    plan, state = layer(spec, attention)
    prompt = inputs(plan, 0 * LENGTHS, LENGTHS, CAPACITY)
    _, state, _ = prefill(plan, parameters_of(plan), state, prompt, (), route=XLA)
    if state.floor is not None:
        floor = state.floor.at[BELOW_FLOOR].set(LENGTHS[BELOW_FLOOR] - 100)
        state = dataclasses.replace(state, floor=floor)
    return plan, state


def run(plan: LayerPlan, state: LayerState, route: Route) -> tuple[list[np.ndarray], LayerState]:
    outputs, lengths = [], LENGTHS
    for _ in range(STEPS):
        new = inputs(plan, lengths, lengths + 1, 1)
        out, state, _ = decode(plan, parameters_of(plan), state, new, (), route=route)
        valid = np.asarray(new.valid)[:, None, :, None]
        outputs.append(np.where(valid, np.asarray(out, np.float32), 0))
        lengths = np.minimum(lengths + 1, CAPACITY)
    return outputs, state


def errors(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest error of a row that is not lost, and check which ones are."""
    pairs = list(zip(found, wanted, strict=True))
    for one, other in pairs:
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    return max(row_errors(np.nan_to_num(one), np.nan_to_num(other)).max() for one, other in pairs)


def name(value: str | Attention | Route) -> str:
    return value.launch.route if isinstance(value, Route) and value.launch else str(value)


@pytest.mark.parametrize(("spec", "attention", "route"), [*some(CASES, USUAL), *ON_GPUS], ids=name)
def test_steps_of_a_windowed_layer_are_those_of_xla(spec: str, attention: Attention, route: Route):
    if not route.launch.interpret and jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    if route.launch.route == "mosaic" and (reason := mosaic.missing()):
        pytest.skip(reason)
    plan, state = prompted(spec, attention)
    assert unsupported(plan, HEADS, 1) is None
    assert plan.regions.wraps == (attention.window is not None)
    wanted, expected = run(plan, state, XLA)
    found, after = run(plan, state, route)
    assert errors(found, wanted) < 1e-2
    assert np.isnan(wanted[0]).any() == plan.regions.wraps, "a trimmed row is lost"
    leaves = zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True)
    for number, (one, other) in enumerate(leaves):
        share = np.count_nonzero(np.asarray(one) != np.asarray(other)) / max(one.size, 1)
        assert share <= 1e-3, f"array {number} of the state: {share:.1e} differ"
    if (spec, attention, route) == CASES[1]:
        for field, other in (("window", 120), ("sinks", False)):
            special = dataclasses.replace(attention, **{field: other})
            wrong, _ = run(dataclasses.replace(plan, attention=special), state, XLA)
            assert errors(found, wrong) > 3e-2, f"{field}={other} would pass"


def test_a_windowed_step_is_three_launches_and_no_loop():
    plan, state = layer("kivi:bits=4", WINDOWED)
    new = inputs(plan, LENGTHS, LENGTHS + 1, 1)
    step = functools.partial(
        decode_layer, plan, parameters_of(plan), carry=(), route=Route("pallas", Launch("asm"))
    )
    text = lower_for_cuda(lambda state, new: step(state, inputs=new), state, new)
    for kernel in ("append_token", "decode_attention", "finish_attention"):
        assert text.count(f'name = "{kernel}') == 1, kernel
    assert "stablehlo.while" not in text


def test_layers_with_windows_that_kernels_do_not_read_are_named():
    for spec in ("kvquant:bits=4", "waterfill:k_widths=65332210,v_widths=44331111"):
        for attention in (CAPPED, WINDOWED):
            plan, _ = layer(spec, attention)
            reason = unsupported(plan, HEADS, 1)
            if attention is WINDOWED:
                assert "in a layer with a window; kernels read neither there" in str(reason)
            else:
                assert reason is None
