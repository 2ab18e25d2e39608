"""Kernels of a step stay inside of their arrays, and one that does not is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tests.pallas_kernels.bounds import watched
from tests.pallas_kernels.decode_attention.test_windows import SIZES, TOKENS, attend, rows
from tests.pallas_kernels.harness import INTERPRETED, check_attention
from tests.pallas_kernels.kernel_cases import kivi
from tests.pallas_kernels.quantize.test_append import LEAVING, append, inputs_of
from tests.pallas_kernels.quantize.test_quantize import CASES
from tests.pallas_kernels.test_mosaic import LENGTHS, TUNING


def test_attention_stays_inside():
    """The capacity is not a multiple of the tile, and the last tile moves back."""
    jax.clear_caches()
    with watched() as outside:
        check_attention(kivi(4, 64, 2), LENGTHS, TUNING, INTERPRETED)
    assert not outside, outside
    assert outside.checked > 100


@pytest.mark.exhaustive
def test_windows_and_blocks_stay_inside():
    """The first ring has fewer slots than a tile, and a block leaves at the end of the other's."""
    jax.clear_caches()
    case = CASES[2]
    with watched() as outside:
        q, first, ring, _ = rows(SIZES[4])
        limits = SIZES[4].body(TOKENS)
        jax.block_until_ready(attend(q, first, ring, TOKENS, limits, launch=INTERPRETED))
        body, of_case, places = inputs_of(case)
        jax.block_until_ready(append(case, body, of_case, places, LEAVING, None, INTERPRETED))
    assert not outside, outside
    assert outside.checked > 100


def test_a_kernel_that_leaves_its_array_is_found():
    def kernel(at_ref, x_ref, out_ref):
        out_ref[...] = x_ref[pl.ds(at_ref[0], 4)]

    def read(at: int) -> jax.Array:
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        call = pl.pallas_call(kernel, out_shape=shape, interpret=True)
        return call(jnp.full((1,), at), jnp.arange(8.0))

    with watched() as outside:
        np.testing.assert_array_equal(read(5), np.arange(4.0, 8.0))  # clamped
    assert any("from 5 .. 5 on, axis 0 of (8,)" in line for line in outside), outside
    with watched() as outside:
        np.testing.assert_array_equal(read(4), np.arange(4.0, 8.0))
    assert not outside
