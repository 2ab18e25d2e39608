"""Tokens appended, windows attended to and blocks quantized by the kernels on Mosaic GPU,
interpreted with a detector of races, against the same by Triton's kernels and by float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from tests.exhaustive import some
from tests.pallas_kernels.decode_attention import test_windows
from tests.pallas_kernels.decode_attention.test_windows import (
    SIZES,
    Sizes,
    before_or_after_rope,
    check,
)
from tests.pallas_kernels.harness import and_on_a_gpu
from tests.pallas_kernels.lowering import needs_mosaic
from tests.pallas_kernels.quantize import test_append, test_quantize
from tests.pallas_kernels.quantize.test_append import LEAVING, append, inputs_of
from tests.pallas_kernels.quantize.test_quantize import (
    CASES,
    QuantizeCase,
    divisor_of,
    fused,
    reader_of,
    special_rows,
)

pytestmark = needs_mosaic
MOSAIC = Launch(interpret=True, route="mosaic")
SERVED = tuple(case for case in CASES if not route.unquantized(reader_of(case.format)))
# Channels with a divisor and tokens; one and two plane sets.
USUAL = [SERVED[0], SERVED[8]]


def named(cases, usual):
    return pytest.mark.parametrize("case", some(cases, usual), ids=lambda case: case.id)


@and_on_a_gpu(MOSAIC)
@before_or_after_rope
@named((*SIZES, Sizes(3, recent=160)), [SIZES[4]])  # the last takes two tiles
def test_attention_is_that_of_the_tokens_outside_the_body(
    case: Sizes, rotation: Any, launch: Launch
):
    check(case, rotation, launch, "bfloat16")


@and_on_a_gpu(MOSAIC)
def test_keys_far_along_a_context_are_rotated_by_their_exact_angle(launch: Launch):
    test_windows.test_keys_far_along_a_context_are_rotated_by_their_exact_angle(launch)


@named(SERVED, USUAL)
def test_rows_are_quantized_to_the_bits_of_the_other_kernel(case: QuantizeCase):
    """Blocks of 128 tokens, the last of which moves back, and one of 32."""
    special = special_rows(case)[1:, :1]
    divisor = divisor_of(case)
    divisor = None if divisor is None else divisor[1:, :1]
    for some_rows in (jnp.concatenate([special, special[:, :, 7:39]], 2), special[:, :, :32]):
        wanted, actual = (
            jax.tree.leaves(fused(case, some_rows, divisor, launch))
            for launch in (Launch(interpret=True), MOSAIC)
        )
        for name, (have, want) in enumerate(zip(actual, wanted, strict=True)):
            np.testing.assert_array_equal(have, want, err_msg=f"array {name}")
        assert all(np.unique(np.asarray(array)).size > 1 for array in wanted), "arrays of one value"


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.id)
def test_codes_scales_and_zeros_on_a_gpu_are_those_of_quantize(case: QuantizeCase):
    test_quantize.test_codes_scales_and_zeros_are_those_of_quantize(case, Launch(route="mosaic"))


@and_on_a_gpu(MOSAIC)
@named(SERVED, USUAL[1:])
def test_a_block_is_written_in_its_place_and_nothing_else(case: QuantizeCase, launch: Launch):
    body, ring, first = inputs_of(case)
    # Interpreters agree to the last bit, a GPU with itself.
    by = Launch(interpret=True) if launch.interpret else launch
    after = append(case, body, ring, first, LEAVING, divisor_of(case, 3), launch)
    wrong = test_append.wrong_in(case, ring, body, after, first, LEAVING, by)
    assert not wrong, wrong
    every = np.ones_like(LEAVING)
    assert test_append.wrong_in(case, ring, body, after, first, every, by), (
        "a row that keeps its block would pass for any other"
    )


@and_on_a_gpu(MOSAIC)
def test_a_new_token_is_one_row_of_the_ring_and_of_the_sink(launch: Launch):
    test_append.test_a_new_token_is_one_row_of_the_ring_and_of_the_sink(launch)


@and_on_a_gpu(MOSAIC)
def test_a_body_of_rows_takes_the_new_one_where_it_leaves_and_nothing_else(launch: Launch):
    test_append.test_a_body_of_rows_takes_the_new_one_where_it_leaves_and_nothing_else(launch)
