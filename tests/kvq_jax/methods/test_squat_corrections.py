"""SQuat's corrections of channels that are not coded yet, in float64 by least squares."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.methods.squat import subspace
from tests.kvq_jax.layer_runs import sequences
from tests.kvq_jax.methods.test_squat import SPEC, statistics


@pytest.mark.parametrize("block", [16, 12, 1, 31])
def test_they_are_the_optimum_for_all_valid_queries_of_a_kv_heads_group(block: int):
    """min |d|^2 + lam |Q^ d|^2 with the coded channels' part given, for a ragged batch whose
    padding is NaN, against SVDs of each row and head."""
    tokens, lengths = sequences(), np.array([90, 61, 40, 16, 7, 3, 2, 1], np.int32)
    found = statistics(f"{SPEC},block_channels={block}", tokens, lengths)
    for b, n in enumerate(lengths):
        for k in range(2):
            q = tokens.q[b, 2 * k : 2 * k + 2, :n].reshape(-1, 32).astype(np.float64)
            _, s, v = np.linalg.svd(q, full_matrices=False)
            stacked = np.concatenate([np.eye(32), 0.01**0.5 * s[:3, None] * v[:3]])
            wanted = np.zeros(found[b, k].shape)
            for start in range(0, 32 - block, block):
                end = start + block
                optimum = np.linalg.lstsq(stacked[:, end:], -stacked[:, start:end], rcond=None)[0]
                wanted[start:, start:end] = optimum
            np.testing.assert_allclose(found[b, k], wanted, atol=2e-6, err_msg=f"row {b}, head {k}")
    assert np.abs(found[0] - found[0, ::-1]).max() > 1e-2, (
        "both heads have one subspace: the comparison says nothing"
    )


def test_a_subspace_too_heavy_for_fp32_still_gives_finite_corrections():
    _, s, v = np.linalg.svd(np.random.default_rng(8).normal(size=(20, 8)), full_matrices=False)

    def corrections(size: float) -> np.ndarray:
        values, vectors = (jnp.asarray(a[None, None], jnp.float32) for a in (s[:3] ** 2, v[:3].T))
        return np.asarray(subspace.updates(size * values, vectors, 1.0, 4))[0, 0]

    # lam to infinity: V^T d = 0, the shortest such
    projected = np.linalg.lstsq(v[:3, 4:], -v[:3, :4], rcond=None)[0]
    np.testing.assert_allclose(corrections(1e12)[:, :4], projected, atol=2e-2)
    assert not corrections(np.nan).any()
