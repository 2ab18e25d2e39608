"""Numbers rounded to the dtype in which they are stored."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvq_jax.arrays.uniform import as_stored


def numbers() -> np.ndarray:
    """Return all finite float16 numbers, their midpoints, the neighbours of these, and others."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.unique(halves[np.isfinite(halves)])
    middle = (halves[1:] + halves[:-1]) / 2
    up, down = (np.nextafter(middle, np.float32(bound)) for bound in (np.inf, -np.inf))
    others = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    return np.concatenate([halves, middle, up, down, others, others * 1e-6])


@pytest.mark.parametrize("dtype", ["float16", np.float16, ml_dtypes.bfloat16, np.float32])
def test_rounding_is_that_of_the_conversion(dtype):
    x = numbers()
    with np.errstate(over="ignore"):
        wanted = x.astype(dtype)
    actual = np.asarray(jax.jit(as_stored, static_argnums=1)(x, dtype))
    assert actual.dtype == wanted.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(actual.astype(np.float32), wanted.astype(np.float32))
    if dtype is not np.float32:
        assert (wanted.astype(np.float32) != x).mean() > 0.3, "few numbers are rounded at all"
