"""Decode attention over every stored format, interpreted, against attention over the rows that the
arrays stand for. (Readers that need more have it in tests/pallas_kernels/readers.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from tests.float64 import row_errors
from tests.pallas_kernels.grouped_sides import format_of, side_of
from tests.pallas_kernels.harness import (
    HEADS,
    INTERPRETED,
    LONG,
    SHORT,
    KernelCase,
    Lengths,
    attend,
    check_attention,
    check_unused_capacity,
    each_lowering,
    launches,
    lowered_attention,
    output,
    outputs,
    reference,
    tuned,
)
from tests.pallas_kernels.kernel_cases import (
    CASES,
    CODEBOOK,
    IN_ASSEMBLY,
    LOWERED,
    POLAR,
    RUNS,
    USUAL,
    cases_of,
    named,
)

GARBAGE = ("innerq1_sym_h128_g4", "kivi2_h64_g8_size64", "dense")
GARBAGE += tuple(case.id for case in (CODEBOOK[0], POLAR[0], RUNS[1]))
SPLIT = "kivi2_h128_g4_size32", "innerq2_hybrid_h128_g1"  # the second on GPUs


@launches(CASES.values(), cases_of(USUAL), cases_of(IN_ASSEMBLY))
def test_every_length_equals_the_reference_on_the_same_codes(case, launch):
    check_attention(case, *case.sizes(launch), launch)


@launches(CASES.values(), cases_of(GARBAGE))
def test_garbage_in_unused_capacity_does_not_leak(case, launch):
    # a GPU may add up outliers of values in any order
    any_order = not launch.interpret and case.sides(case.long)[1].reader.adds_values
    check_unused_capacity(case, *case.sizes(launch), launch, 1e-5 if any_order else 0.0)


@named("k_dense_v2")
def test_the_default_step_and_splits_serve_lengths_of_any_kind(case):
    check_attention(case, LONG, None)


@named("dense")
def test_full_precision_rows_may_be_any_number(case):
    check_attention(case, Lengths(277, (0, 1, 31, 32, 129, 276, 277)), tuned(2, 32))


@launches(cases_of(SPLIT), cases_of(SPLIT[:1]))
def test_the_number_of_splits_changes_nothing_but_rounding(case, launch):
    k, v = (side.arrays for side in case.sides(SHORT))
    one, many = (outputs(case, (k, v), SHORT, tuned(n, tile=32), launch) for n in (1, 3))
    assert row_errors(many, one)[1:].max() < 2e-3
    assert row_errors(many[1:], one[:-1])[1:].max() > 3e-2, "rows of other lengths must differ"
    if not launch.interpret:
        check_attention(case, SHORT, tuned(2), launch)


FORMATS = {  # of keys and of values
    "innerq1_sym": [format_of(1, "sym", axis, 128) for axis in ("channels", "tokens")],
    "kivi4": [format_of(4, "asym", axis, 128) for axis in ("tokens", "channels")],
    "kivi2_size64": [
        format_of(2, "asym", axis, 64, size) for axis, size in (("tokens", 64), ("channels", 32))
    ],
}


@launches(("innerq1_sym", "kivi4"), ("kivi4",))
def test_weights_below_the_least_number_of_fp16_still_count(case, launch):
    """Rows whose first token, of value 0, has 2^27 times the weight of each other one. If
    weights were rounded to fp16 as they are, the others would be 0.
    """
    shape = 1, HEADS, SHORT.capacity, 128
    keys = np.zeros(shape, np.float32)
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    keys[:, :, :32] = 1e-3  # a group over tokens has one scale: its other tokens are close to 0
    keys[:, :, 0] = 27 * np.log(2) * shape[3] ** -0.5
    values[:, :, 0] = 0
    k, v = (side_of(f, rows) for f, rows in zip(FORMATS[case], (keys, values), strict=True))
    q, limits = jnp.ones((1, HEADS, 4, shape[3]), jnp.float32), (SHORT.capacity,)
    readers = k.reader, v.reader
    part = attend(readers, q, k.arrays, v.arrays, jnp.asarray(limits), *limits, tuned(2), launch)
    expected = reference(q, k.rows, v.rows, limits)
    assert 0 < np.abs(expected).max() < 1e-5, "the weights are not small"
    assert not v.rows[:, :, 0].any()
    assert row_errors(output(part), expected).max() < 3e-2


@launches(("innerq1_sym", "kivi2_size64"), ("innerq1_sym",))
def test_rows_at_the_end_of_fp16s_range_are_read(case, launch):
    """Values as large as float16 scales allow: codes are multiplied by scales in fp16."""
    head_dim = FORMATS[case][0].channels
    shape, capacity = (1, HEADS, 64, head_dim), 64
    keys, values = (np.random.default_rng(i).uniform(-1, 1, shape) for i in (0, 1))
    values[:, :, ::7], values[:, :, 1::7] = 1, -1
    k, v = (
        side_of(f, rows.astype(np.float32))
        for f, rows in zip(FORMATS[case], (keys, values * 32752), strict=True)
    )
    assert np.abs(v.rows).max() > 32700
    queries = np.random.default_rng(2).standard_normal((1, HEADS, 8, head_dim))
    q, tuning = jnp.asarray(queries, jnp.float32), Tuning(tile=64, cores=HEADS, resident=1)
    readers, limits = (k.reader, v.reader), jnp.asarray([capacity])
    actual = output(attend(readers, q, k.arrays, v.arrays, limits, capacity, tuning, launch))
    assert row_errors(actual, reference(q, k.rows, v.rows, [64])).max() < 1e-2
    assert row_errors(actual, reference(q, k.rows, v.rows, [63])).max() > 1e-2, (
        "without the last token it would pass"
    )


@each_lowering(list(CASES.values()), cases_of(LOWERED))
def test_every_kernel_lowers_for_cuda(case, arithmetic):
    text = lowered_attention(case, Launch(arithmetic))
    assert "triton" in text, "another route than Triton"
    assert "decode_attention" in text, "the kernel has lost its name"
    assert ("outlier_scores" in text) == (case in CODEBOOK and case.id != "nuq4_h256")
    if case in POLAR:
        assert ("cos.approx" in text) == (arithmetic == "asm")


def lowered(case: KernelCase, capacity: int, tuning: Tuning | None) -> None:
    k, v = case.sides(LONG)
    jax.eval_shape(
        lambda q, k_arrays, v_arrays: decode_attention(
            q,
            (k.reader, k_arrays),
            (v.reader, v_arrays),
            jnp.zeros(LONG.batch, jnp.int32),
            capacity=capacity,
            tuning=tuning,
            launch=INTERPRETED,
        ),
        *(case.queries(LONG.batch), k.arrays, v.arrays),
    )


@named("kivi2_h128_g4_size32")
def test_packed_rows_that_end_within_a_span_are_refused(case):
    with pytest.raises(ValueError, match="capacity=1080: packed rows come in whole spans of 32"):
        lowered(case, 1080, None)


@pytest.mark.parametrize("tile", [16, 48, 2 * LONG.capacity])
@named("dense")
def test_steps_that_do_not_fit_the_contract_are_refused(case, tile):
    with pytest.raises(ValueError, match=f"tile={tile}"):
        lowered(case, LONG.capacity, Tuning(tile=tile))
