"""TurboQuant: its levels are optimal for the sphere's coordinates, and its body is what the
equations say."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.rotations import rotation
from kvq_jax.methods.turboquant.levels import sphere_levels

PAPER = {
    1: 0.36,
    2: 0.117,
    3: 0.03,
    4: 0.009,
}  # Theorem 1's table: relative squared error for large dimensions


def directions(count: int, channels: int) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(count, channels))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def error(rows: np.ndarray, levels: np.ndarray) -> float:
    nearest = levels[np.abs(rows[..., None] - levels).argmin(-1)]
    return float(np.mean(np.sum((rows - nearest) ** 2, axis=-1)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_have_the_papers_error_and_none_near_them_has_less(bits: int):
    rows, levels = directions(2000, 128), np.asarray(sphere_levels(bits, 128))
    found = error(rows, levels)
    assert found == pytest.approx(PAPER[bits], rel=0.15)
    for factor in (0.97, 1.03):
        assert error(rows, factor * levels) > found, f"{factor} times the levels are better"
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)


def test_levels_are_means_of_their_cells_in_few_dimensions_too():
    """In 3 dimensions a coordinate is uniform, and so are the levels; 4 dimensions by sampling."""
    np.testing.assert_allclose(sphere_levels(2, 3), [-0.75, -0.25, 0.25, 0.75], atol=1e-6)
    drawn, levels = directions(200_000, 4).ravel(), np.asarray(sphere_levels(2, 4))
    ends = [-1, *((levels[1:] + levels[:-1]) / 2), 1]
    for level, (low, high) in zip(levels, itertools.pairwise(ends), strict=True):
        assert drawn[(drawn > low) & (drawn < high)].mean() == pytest.approx(level, abs=2e-3)
    with pytest.raises(ValueError, match="head_dim 2"):
        sphere_levels(2, 2)


def test_the_body_is_what_the_equations_say():
    rng, matrix, levels = np.random.default_rng(1), rotation(64), np.asarray(sphere_levels(3, 64))
    k, v = (
        rng.normal(size=(1, 2, 32, 64)) * np.exp(rng.normal(size=(1, 2, 32, 1))) for _ in range(2)
    )
    spec, fp32 = "turboquant:scale_dtype=float32", map(jnp.float32, (k, v))
    found = kvq.roundtrip(spec, *fp32, layout="BNTH")
    for one, rows in zip(found, (k, v), strict=True):
        norm = np.linalg.norm(rows, axis=-1, keepdims=True)
        turned = rows @ matrix.T / norm
        wanted = norm * levels[np.abs(turned[..., None] - levels).argmin(-1)] @ matrix
        off = np.linalg.norm(np.asarray(one) - wanted, axis=-1) > 1e-4 * norm[..., 0]
        assert off.mean() <= 0.02, "a coordinate midway between two levels may take either"
        assert np.linalg.norm(np.asarray(one) - rows) == pytest.approx(
            np.sqrt(PAPER[3]) * np.linalg.norm(rows), rel=0.15
        )
