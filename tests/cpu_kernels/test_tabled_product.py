"""The C++ product with matrices whose outputs have tables and sparse entries: the definition, the
rows beside a row, and arrays that do not fit."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cpu_kernels import library
from cpu_kernels.tabled_product import tabled_products
from tests.cpu_kernels.test_packed_product import check_nan, check_product

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)

Arrays = list[np.ndarray]


def matrix(outputs: int, inputs: int, sparse: float, dtype: Any) -> tuple[Arrays, np.ndarray]:
    """Return (codes, levels, starts, inputs, values), and the matrix [I, O]. A third of the outputs
    have no sparse entries, and output 1 has nothing else."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (outputs, inputs))
    levels, values = (rng.normal(size=(outputs, n)).astype(dtype) for n in (16, inputs))
    kept = rng.random((outputs, inputs)) < sparse
    kept[::3], kept[1] = False, sparse > 0
    codes[kept] = 0
    words = np.sum(
        codes.reshape(outputs, -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32),
        axis=2,
        dtype=np.uint32,
    )
    starts = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    arrays = [words, levels, starts, np.nonzero(kept)[1].astype(np.uint16), values[kept]]
    of_codes = np.take_along_axis(levels.astype(float), codes, axis=1)
    return arrays, np.where(kept, values.astype(float), of_codes).T


def product(x: np.ndarray, *matrices: Arrays) -> Arrays:
    stored = [[jnp.asarray(array) for array in arrays] for arrays in matrices]
    return [np.asarray(y) for y in tabled_products(jnp.asarray(x), stored)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("outputs", "inputs", "sparse"), [(72, 96, 0.02), (33, 136, 0.5), (40, 256, 0.0), (5, 8, 0.3)]
)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 19])
def test_a_product_is_as_defined_and_a_row_has_the_same_bits_alone(
    outputs: int, inputs: int, sparse: float, dtype: Any, tokens: int
):
    arrays, w = matrix(outputs, inputs, sparse, dtype)
    check_product(lambda x: product(x, arrays)[0], w, tokens)


def test_a_row_becomes_fp32():
    arrays, _ = matrix(40, 64, 0.1, np.float32)
    x = np.ones((2, 64))
    np.testing.assert_array_equal(
        product(x.astype(ml_dtypes.bfloat16), arrays)[0], product(x.astype(np.float32), arrays)[0]
    )


def test_sparse_entries_stand_in_place_of_their_codes():
    arrays, w = matrix(40, 64, 0.1, np.float32)
    without = [*arrays[:2], np.zeros_like(arrays[2]), arrays[3][:0], arrays[4][:0]]
    whole, dense = (
        product(np.eye(64, dtype=np.float32), stored)[0] for stored in (arrays, without)
    )
    np.testing.assert_allclose(whole, w, rtol=1e-6, atol=1e-6)
    sparse = np.abs(dense - w) > 1e-5
    assert sparse.sum() == len(arrays[3]), "the entries change nothing else, and nothing less"


@pytest.mark.parametrize("tokens", [1, 3])
def test_one_call_multiplies_by_several_matrices_as_calls_of_their_own_do(tokens: int):
    made = [matrix(outputs, 64, 0.05, np.float16)[0] for outputs in (40, 41, 7)]
    x = np.random.default_rng(3).normal(size=(tokens, 64)).astype(np.float32)
    for arrays, together in zip(made, product(x, *made), strict=True):
        np.testing.assert_array_equal(together, product(x, arrays)[0])


def test_nan_in_a_row_stays_in_its_row():
    arrays, w = matrix(40, 64, 0.05, np.float32)
    check_nan(lambda x: product(x, arrays)[0], w)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (0, lambda a: a[:, 1:], "codes must be"),
        (0, lambda a: a.view(np.int32), "codes must be"),
        (1, lambda a: a[:, :15], "levels must be"),
        (2, lambda a: a[1:], "starts must be"),
        (2, lambda a: a[::-1].copy(), "starts must rise"),
        (2, lambda a: a + 1, "starts must rise"),
        (2, lambda a: np.where(np.arange(len(a)) == 5, 1 << 20, a).astype(a.dtype), "must rise"),
        (3, lambda a: np.full_like(a, 64), "must be below I"),
        (3, lambda a: a.astype(np.int32), "sparse entries must be"),
        (4, lambda a: a[1:], "sparse entries must be"),
        (4, lambda a: a.astype(np.float16), "sparse entries must be"),
    ],
)
def test_arrays_that_do_not_fit_are_an_error_of_xla(at: int, change: Any, message: str):
    arrays, _ = matrix(40, 64, 0.05, np.float32)
    arrays[at] = change(arrays[at])
    with pytest.raises(Exception, match=message):
        product(np.ones((1, 64), np.float32), arrays)
