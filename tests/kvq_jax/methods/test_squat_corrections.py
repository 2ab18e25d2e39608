"""SQuat's corrections of uncoded channels, in float64 by other means: least squares and the paper's
lemmas."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.methods.squat import subspace


class TestCorrections:
    """Of what is left after channels took an error, in float64 by other means."""

    @staticmethod
    def problem(channels: int, rank: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (S^2 [r], V^T [H, r], Q^ [r, H])."""
        _, s, v = np.linalg.svd(
            np.random.default_rng(channels).normal(size=(20, channels)), full_matrices=False
        )
        return s[:rank] ** 2, v[:rank].T, s[:rank, None] * v[:rank]

    @staticmethod
    def corrections(values: np.ndarray, vectors: np.ndarray, lam: float, block: int) -> np.ndarray:
        as_jax = (jnp.asarray(a[None, None], jnp.float32) for a in (values, vectors))
        return np.asarray(subspace.updates(*as_jax, lam, block), np.float64)[0, 0]

    @pytest.mark.parametrize(("channels", "block"), [(6, 2), (7, 3), (8, 1), (9, 8)])
    def test_they_are_the_constrained_optimum(self, channels: int, block: int):
        """min |d|^2 + lam |Q^ d|^2 with the coded channels' part given: least squares over the
        other channels."""
        lam, (values, vectors, q) = 0.1, self.problem(channels)
        found = self.corrections(values, vectors, lam, block)
        stacked = np.concatenate([np.eye(channels), np.sqrt(lam) * q])
        for start in range(0, channels - block, block):
            end = start + block
            error = np.random.default_rng(start).normal(size=block)
            wanted = np.linalg.lstsq(stacked[:, end:], -stacked[:, start:end] @ error, rcond=None)[
                0
            ]
            moved = found[end - block :, start:end] @ error
            np.testing.assert_allclose(moved, wanted, atol=2e-6)
            assert np.abs(wanted).max() > 1e-2, "nothing to correct: the comparison says nothing"
            assert not found[: end - block, start:end].any(), (
                "a channel that is coded already moves"
            )

    def test_a_subspace_too_heavy_for_fp32_still_gives_finite_corrections(self):
        values, vectors, _ = self.problem(8)
        heavy = self.corrections(1e12 * values, vectors, 1.0, 4)
        projected = np.linalg.lstsq(vectors[4:].T, -vectors[:4].T, rcond=None)[
            0
        ]  # lam to infinity: V^T d = 0, the shortest such
        np.testing.assert_allclose(heavy[:, :4], projected, atol=2e-2)
        assert not self.corrections(np.nan * values, vectors, 1.0, 4).any()
