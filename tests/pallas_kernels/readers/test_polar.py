"""Special features of the reader of polar keys. (test_decode.py compares it with the reference.)"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import Launch
from pallas_kernels.readers.polar import polynomial_cos_sin
from tests.pallas_kernels.harness import (
    INTERPRETED,
    Lengths,
    attend,
    check_attention,
    on_a_gpu,
    tuned,
)
from tests.pallas_kernels.kernel_cases import POLAR

CASE = POLAR[0]  # groups of 128 tokens


def lengths_around(tile: int) -> Lengths:
    return Lengths(384, (0, 1, tile - 1, tile, tile + 1, min(5 * tile // 2 + 1, 352), 384))


@pytest.mark.parametrize("tile", [64, 256])
def test_a_tile_may_be_a_part_of_a_group_or_hold_several(tile):
    check_attention(CASE, lengths_around(tile), tuned(2, tile))


@on_a_gpu
def test_a_tile_may_be_a_whole_group_on_a_gpu(arithmetic):
    check_attention(CASE, lengths_around(128), tuned(2, 128), Launch(arithmetic))


def test_values_in_polar_form_and_other_numbers_of_arrays_are_refused():
    k, v = CASE.sides(CASE.short)
    capacity, batch = CASE.short.capacity, CASE.short.batch
    q, limits = CASE.queries(batch), jnp.asarray(CASE.short.limits)
    args = limits, capacity, tuned(1, 32, batch), INTERPRETED
    with pytest.raises(NotImplementedError, match="polar codes hold keys"):
        attend((k.reader, k.reader), q, k.arrays, k.arrays, *args)
    with pytest.raises(ValueError, match=r"are 5 arrays"):
        attend((k.reader, v.reader), q, k.arrays[:3], v.arrays, *args)


@pytest.mark.parametrize("bias", [0, 1024])
def test_polynomials_are_cosines_and_sines_of_any_angle_of_a_group(bias):
    """As a kernel calls them, with the bias of a code in the least angle."""
    code, step = np.meshgrid(np.arange(16) + 0.5, np.linspace(0, 2 * np.pi / 16, 50))
    code, step = (np.tile(x, (33, 1)) for x in (code, step))
    theta = code * step + np.repeat(np.linspace(-np.pi, np.pi, 33), 50)[:, None]
    start = np.float32(theta - (code + bias) * step)
    cos, sin = polynomial_cos_sin(
        *(jnp.asarray(x, jnp.float32) for x in (code + bias, step, start))
    )
    errors = np.abs(cos - np.cos(theta)).max(), np.abs(sin - np.sin(theta)).max()
    assert max(errors) < (1e-4 if bias else 4.2e-5)
    assert np.abs(cos - np.sin(theta)).max() > 1, "sines would pass as cosines"
