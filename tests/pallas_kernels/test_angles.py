"""Cosines and sines of position times frequency against float64, at every length of a context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pallas_kernels.angles import cos_and_sin
from tests.compile_options import QUICK_COMPILE, USUAL_COMPILE

TOLERANCE = 1e-6
POSITIONS = np.concatenate(
    [np.random.default_rng(0).integers(0, 1 << 24, 500), np.arange(4), (1 << 24) - np.arange(4)]
).astype(np.int32)
BASES = (1e4, 1e5, 5e5, 1e6)
FREQUENCIES = np.concatenate(
    [np.float32(1) / np.float32(base) ** (np.arange(64, dtype=np.float32) / 64) for base in BASES]
)


def error(tables: tuple[Array, Array], positions: np.ndarray, frequencies: np.ndarray) -> float:
    """Return the largest error of cosines and sines against float64 on the exact products."""
    angles = positions[:, None].astype(np.float64) * frequencies.astype(np.float64)
    wanted = np.cos(angles), np.sin(angles)
    return max(
        np.abs(np.asarray(table, np.float64) - right).max()
        for table, right in zip(tables, wanted, strict=True)
    )


def plain_product(positions: Array, frequencies: Array) -> tuple[Array, Array]:
    angles = positions[:, None].astype(jnp.float32) * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


@pytest.mark.parametrize("options", [QUICK_COMPILE, USUAL_COMPILE], ids=["quick", "optimized"])
def test_positions_up_to_16_million_are_turned_by_their_exact_angle(options: dict):
    """Optimizing compilers contract products and sums, and may reorder them."""
    tables = (
        jax.jit(cos_and_sin).lower(POSITIONS, FREQUENCIES).compile(options)(POSITIONS, FREQUENCIES)
    )
    assert error(tables, POSITIONS, FREQUENCIES) < TOLERANCE
    assert error(tables[::-1], POSITIONS, FREQUENCIES) > 1, "sines pass for cosines"


def test_the_product_in_fp32_is_not_exact_enough():
    assert error(jax.jit(plain_product)(POSITIONS, FREQUENCIES), POSITIONS, FREQUENCIES) > 0.1


@pytest.mark.parametrize("factor", [1 / 32, 1 / 3, 2.5])
def test_rescaled_frequencies_and_all_other_positions_hold_too(factor: float):
    """Scaled RoPE divides frequencies. Positions before 0 and past 2^24 must fit an int32."""
    positions = np.concatenate([-POSITIONS, POSITIONS * np.int32(127)])
    frequencies = (FREQUENCIES * np.float32(factor)).astype(np.float32)
    tables = jax.jit(cos_and_sin)(jnp.asarray(positions), jnp.asarray(frequencies))
    assert error(tables, positions, frequencies) < TOLERANCE
