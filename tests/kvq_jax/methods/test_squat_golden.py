"""SQuat against what its public implementation returns for the same numbers (a slice in
tests/golden/): one KV head and 64 of its keys. In place of its 512 queries stands their triangular
factor, Q^T Q = R^T R, whose rows have the same singular values and directions.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.methods.squat import subspace
from kvq_jax.methods.squat.codec import SquatCodec
from kvq_jax.types.array_types import LayerInputs
from tests.kvq_jax.methods.test_golden import compare_codes, compare_numbers, golden
from tests.kvq_jax.origins import PROMPT

CODEC = SquatCodec(
    "k",
    GroupFormat(2, "asym", "tokens", 32, 128, 32, "float32"),
    rank=5,
    lam=1e-3,
    block_channels=64,
)


def data() -> dict[str, np.ndarray]:
    return golden("squat_r5_lam0.001_g64_b2")


def statistics(codec: SquatCodec = CODEC):
    queries = jnp.asarray(data()["Q_triangular"])
    keys = jnp.zeros_like(queries)
    positions = jnp.arange(queries.shape[2], dtype=jnp.int32)[None]
    return codec.statistics.of(
        (), LayerInputs(None, None, queries, None, keys, keys, positions, positions >= 0, None)
    )


def coded(matrices) -> tuple[np.ndarray, np.ndarray, grouped_array.GroupedArray]:
    body = CODEC.quantize((), jnp.asarray(matrices), jnp.asarray(data()["K"]), PROMPT)
    return np.asarray(grouped_array.codes(body)), np.asarray(CODEC.dequantize((), (), body)), body


def relative(found, expected) -> float:
    return float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())


def test_the_subspace_is_that_of_the_public_code():
    upper = data()["QtQ_upper"]
    matrix = subspace.gram(jnp.asarray(data()["Q_triangular"]), jnp.ones((1, 128), bool), 1)

    def projected(rank: int) -> np.ndarray:
        values, vectors = subspace.directions(matrix, rank)
        return np.triu(
            np.asarray(jnp.einsum("bkhr,bkr,bkir->bkhi", vectors, values, vectors))[0, 0]
        )

    assert relative(projected(5), upper) <= 2e-5
    assert relative(projected(4), upper) > 1e-3, "a direction less goes unnoticed"


def test_the_matrices_are_those_of_the_public_code():
    """Both are computed in fp32, from Q^T Q here and from Q there, whose largest eigenvalue is 125
    times the fifth."""
    assert relative(statistics(), data()["BH"]) <= 2e-4
    assert relative(statistics(dataclasses.replace(CODEC, lam=1.01e-3)), data()["BH"]) > 2e-4, (
        "another weight goes unnoticed"
    )


def test_codes_and_numbers_are_those_of_the_public_code_given_its_matrices():
    codes, numbers, body = coded(data()["BH"])
    compare_codes(codes, data()["codes"])
    compare_numbers(numbers, data()["deq"])
    compare_numbers(body.scale, data()["scale"])
    compare_numbers(body.zero, data()["mn"])
    with pytest.raises(AssertionError):
        compare_codes(coded(np.zeros_like(data()["BH"]))[0], data()["codes"])
    with pytest.raises(AssertionError):
        compare_codes(coded(-data()["BH"])[0], data()["codes"])


def test_codes_from_the_queries_are_those_of_the_public_code():
    codes, numbers, _ = coded(statistics())
    compare_codes(codes, data()["codes"])
    assert relative(numbers, data()["deq"]) <= 2e-5
