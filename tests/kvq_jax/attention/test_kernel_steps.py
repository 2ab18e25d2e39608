"""Many steps of a layer through the kernels, against XLA: tokens enter the windows, blocks leave
them, rows rest and fill up."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import XLA, Route
from kvq_jax.cache.update import decode_layer
from kvq_jax.layer.plan import LayerPlan, LayerState, by_side
from kvq_jax.types.rope import rotate
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.kvq_jax.attention.test_dispatch import CAPACITY, DIMS, decode, plan_of, prefill, tokens
from tests.kvq_jax.layer_runs import CAPACITY as CASE_CAPACITY
from tests.kvq_jax.layer_runs import DIMS as CASE_DIMS
from tests.kvq_jax.layer_runs import parameters_of, row_errors, sequences
from tests.methods_table import MethodCase, cases
from tests.pallas_kernels.lowering import lower_for_cuda

MIXED = (  # blocks of 64 in a ring of 160, in which they wrap
    "k=polarquant:radius_bits=2,group_size=64+v=kivi:bits=4"
)
OUTLIERS = (  # without a window of recent tokens: a block leaves with the token that completes it
    "kvquant:bits=4"
)
SPECS = (
    *(
        "kivi:bits=4",
        "innerq:bits=2",
        "innerq:bits=2,recent=100",
        "dense",
        "dense:block=32",
        "nf4",
        "kivi:bits=4,pre_rope=true",
    ),
    *(MIXED, OUTLIERS, "kvquant:bits=4,pre_rope=false"),
)
ON_GPUS = Launch("jnp"), Launch("asm"), Launch(route="mosaic")
LENGTHS = np.array([0, 127, 95, 260, CAPACITY - 37], np.int32)
STEPS = 12  # in which three blocks leave a window
RESTING = 2  # this row takes no token in every third step


def lengths_of(plan: LayerPlan) -> np.ndarray:
    """Return the lengths of rows: one with nothing yet, three from which a block leaves within
    STEPS, one that is full after nine.

    With the first block to leave, new tokens start to overwrite the ring. The block of the resting
    row wraps around in the ring, if any does.
    """
    regions = plan.regions
    leaves = [
        n for n in range(1, CAPACITY - STEPS) if regions.aged_tokens(n) > regions.aged_tokens(n - 1)
    ]

    def wraps(n: int) -> bool:
        first = regions.aged_tokens(n - 1) % regions.ring_slots
        return first + regions.block > regions.ring_slots

    wrapping = next(filter(wraps, leaves), leaves[len(leaves) // 2])
    return np.array([0, leaves[0] - 1, wrapping - 3, leaves[-1] - 7, CAPACITY - 9], np.int32)


def run(spec: str, route: Route) -> tuple[list[jax.Array], LayerState, LayerPlan, np.ndarray]:
    """Return the outputs of all steps, the state after them, the plan and the lengths."""
    cache = kvq.init_cache(spec, DIMS, len(LENGTHS), CAPACITY, "bfloat16")
    plan, state = cache.plans[0], cache.layers[0]
    lengths = lengths_of(plan)
    prompt = tokens().window(np.zeros_like(lengths), lengths, CAPACITY)
    _, state, _ = prefill(plan, parameters_of(plan), state, prompt, (), route=XLA)
    outputs = []
    for step in range(STEPS):
        after = np.minimum(lengths + 1, CAPACITY)
        after[RESTING] -= step % 3 == 0
        out, state, _ = decode(
            plan, parameters_of(plan), state, tokens().window(lengths, after, 1), (), route=route
        )
        outputs.append(jnp.where((after > lengths)[:, None, None, None], out, 0))
        lengths = after
    return outputs, state, plan, lengths


def compare(spec: str, route: Route, maximum: float = 1e-2) -> None:
    wanted, expected, plan, lengths = run(spec, XLA)
    found, state, _, _ = run(spec, route)
    body = plan.regions.aged_tokens
    blocks = [
        (body(int(after)) - body(int(before))) // plan.regions.block
        for before, after in zip(lengths_of(plan), lengths, strict=True)
    ]
    assert sum(blocks) >= 3, f"{blocks=}: too few leave a window"
    assert lengths.max() == CAPACITY
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        error = row_errors(one, other).max()
        assert error < maximum, f"step {step}: {error:.1e}"
    assert (
        max(row_errors(one, other).max() for one, other in zip(found, wanted[1:], strict=False))
        > 0.1
    ), "another step's output would pass"
    for path, (one, other) in enumerate(
        zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    ):
        share = np.count_nonzero(np.asarray(one) != np.asarray(other)) / max(one.size, 1)
        assert share <= 1e-3, (
            f"array {path} of the state: {share:.1e} of {one.dtype}{one.shape} differ"
        )


@pytest.mark.parametrize(
    "spec", some(SPECS, ("innerq:bits=2,recent=100", "kivi:bits=4,pre_rope=true", OUTLIERS))
)
def test_steps_are_those_of_xla(spec):
    compare(spec, Route("pallas", Launch(interpret=True)))


def test_blocks_enter_the_body_in_one_launch_and_in_no_loop():
    """Compiled for a GPU; a ring that does not hold whole groups, which the kernel would read in
    one piece, goes the other way."""
    others = MIXED, "polarquant", "dense:block=32", OUTLIERS
    programs = {}
    for spec in ("kivi:bits=4", "kivi:bits=4,recent=100", *others):
        plan = plan_of(spec)
        state = jax.eval_shape(
            lambda spec=spec: kvq.init_cache(spec, DIMS, len(LENGTHS), CAPACITY, "bfloat16").layers[
                0
            ]
        )
        new = jax.eval_shape(lambda given: given, tokens().window(LENGTHS, LENGTHS + 1, 1))
        step = functools.partial(
            decode_layer, plan, parameters_of(plan), carry=(), route=Route("pallas", Launch())
        )
        programs[spec] = lower_for_cuda(
            lambda state, new, step=step: step(state, inputs=new), state, new
        )
    aligned, unaligned = programs["kivi:bits=4"], programs["kivi:bits=4,recent=100"]
    assert aligned.count("append_token") == unaligned.count("append_token") > 0
    assert "quantize_asym_" not in aligned, "blocks are quantized into arrays of their own first"
    assert "stablehlo.while" not in aligned
    assert "stablehlo.case" not in aligned, "a branch"
    assert "stablehlo.case" in unaligned
    assert unaligned.count("quantize_asym_") >= 2
    for spec in others:
        assert programs[spec].count("append_token") == aligned.count("append_token"), spec
        assert "top_k" not in programs[spec], f"{spec}: XLA looks for outliers"
        if spec != OUTLIERS:  # whose windows, before RoPE, ask for the platform
            assert "stablehlo.case" not in programs[spec], f"{spec}: a branch"
    for kernel in (
        "append_token",
        "outlier_scores",
        "decode_attention",
        "outlier_values",
        "finish_attention",
    ):
        assert len(re.findall(rf'name = "{kernel}', programs[OUTLIERS])) == 1, (
            f"{OUTLIERS}: {kernel}"
        )
    assert "scatter" not in programs[OUTLIERS], f"{OUTLIERS}: outliers are summed by XLA"


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ON_GPUS, ids=["jnp", "asm", "mosaic"])
@pytest.mark.parametrize("spec", SPECS)
def test_steps_on_a_gpu_are_those_of_xla(spec, launch):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    # Mosaic GPU multiplies rows in bfloat16 by weights in bfloat16.
    rounded = spec.startswith("dense") and launch.route == "mosaic"
    compare(spec, Route("pallas", launch), 2e-2 if rounded else 1e-2)


def test_a_full_row_is_never_said_to_hold_more_than_its_body(monkeypatch: pytest.MonkeyPatch):
    """A token past the capacity would complete a block that the arrays have no room for."""
    capacity = 96 + 3 * 32 + 31
    plan = plan_of("kivi:bits=4", capacity=capacity)
    assert plan.regions.aged_tokens(capacity + 1) > plan.regions.body_capacity, (
        "this capacity shows nothing"
    )
    seen: list[np.ndarray] = []

    def attend(plan, params, before, after, body, inputs, limits, windows, chosen):
        seen.append(np.asarray(limits))
        return inputs.q_rot

    monkeypatch.setattr(dispatch, "attend", attend)
    full = np.full_like(LENGTHS, capacity)
    inputs = dataclasses.replace(
        tokens().window(full, full + 1, 1), valid=jnp.zeros((len(full), 1), bool)
    )
    state = kvq.init_cache("kivi:bits=4", DIMS, len(full), capacity, "bfloat16").layers[0]
    decode_layer(plan, parameters_of(plan), state, inputs, (), XLA)
    np.testing.assert_array_equal(seen[0], plan.regions.body_capacity)


@cases()
def test_a_codec_says_whether_stored_rows_are_vectors_or_lack_their_rotation_alone(
    case: MethodCase,
):
    """The kernel of windows reads what is stored, and at most rotates it; so nothing else may be
    left to do with it."""
    for plan in dict.fromkeys(
        kvq.cache.layout(case.spec, CASE_DIMS, 1, CASE_CAPACITY, "float32").plans
    ):
        params = by_side(parameters_of(plan))
        for codec, own, ring in zip(
            plan.codecs, params, plan.layout(1, "float32").ring, strict=False
        ):
            rows = jnp.ones(ring.shape, jnp.float32)
            positions = jnp.arange(ring.shape[2], dtype=jnp.int32)[None]
            returned = codec.vectors(own, rows, positions, sequences().rope)
            said = f"{type(codec).__name__} of {plan.k}, {plan.v}"
            assert (returned is rows) == (codec.facts.form == "vectors"), said
            turned = rows.shape == returned.shape and np.array_equal(
                returned, rotate(rows, positions, sequences().rope)
            )
            assert turned == (codec.facts.form == "before_rope"), said
