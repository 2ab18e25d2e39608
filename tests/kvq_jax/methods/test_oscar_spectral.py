"""OSCAR against NumPy that follows its equations, and the rotation that its calibration gives."""

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.rotations import rotation
from kvq_jax.codecs.codec import Side
from kvq_jax.methods.oscar_spectral.codec import spectral_turn
from tests.kvq_jax.methods.equations import assert_nearly_all_agree, clipped, read_back, rounded

HEADS, TOKENS, H = 2, 32, 16
DIMS = kvq.CacheDims(1, 4, HEADS, H, 64)
SPEC = "oscar_spectral:group_size=8,scale_dtype=float32,sink=0,recent=0,block=32"


def uneven(seed: int) -> np.ndarray:
    """Return vectors [K, T, H] of very different variances along hidden directions."""
    rng = np.random.default_rng(seed)
    hidden = np.linalg.qr(rng.normal(size=(HEADS, H, H)))[0]
    return rng.normal(size=(HEADS, TOKENS, H)) * np.exp(-np.arange(H) / 3) @ hidden


def eigenvectors(moment: np.ndarray) -> np.ndarray:
    """Return eigenvectors as columns, by falling eigenvalue, found by singular values."""
    return np.linalg.svd(moment)[0]


def coded(rows: np.ndarray, turn: np.ndarray, kept: float) -> np.ndarray:
    """Return what rows [K, T, H] read as: rotated, clipped, four levels for each 8 channels."""
    return rounded(clipped(rows @ turn, kept), 2, group=8) @ np.swapaxes(turn, 1, 2)


@pytest.mark.parametrize("side", ["k", "v"])
def test_calibration_and_body_are_what_the_equations_say(side: Side):
    """With queries in place of gradients, keys get the paper's rotation. Values are weighted by the
    squares of their gradients' norms."""
    rows, gradients = uneven(1), uneven(2)
    both: dict[Side, np.ndarray] = {"k": rows[None], "v": rows[None]}
    slopes: dict[Side, np.ndarray] = {"k": gradients[None], "v": gradients[None]}
    turn = kvq.parameters.calibrate(SPEC, DIMS, 0, both, slopes)[side]["turn"]
    weights = 1.0 if side == "k" else np.sum(gradients**2, axis=-1, keepdims=True)
    seen = gradients if side == "k" else rows
    moment = np.swapaxes(seen, 1, 2) @ (weights * seen) / TOKENS
    undone = turn @ rotation(H)  # without the Hadamard matrix
    strongest = slice(0, 8)  # eigenvalues far enough from each other for both methods
    agreement = np.abs(np.einsum("khe,khe->ke", undone, eigenvectors(moment)))[:, strongest]
    assert (agreement > 0.999).all(), f"directions agree by {agreement.min():.3f}"
    plain = np.einsum("khe,khe->ke", undone, eigenvectors(np.swapaxes(rows, 1, 2) @ rows))
    assert np.abs(plain)[:, strongest].min() < 0.9, "the plain moment of rows would pass"

    codec = getattr(kvq.parse(SPEC).layer(0, DIMS, TOKENS, "float32"), side)
    wanted = coded(rows, turn, {"k": 0.96, "v": 0.92}[side])
    read = read_back(codec, {"turn": turn}, rows)
    assert_nearly_all_agree(read, wanted, 1e-4 * np.abs(rows).max(), share=0.05)
    other = coded(rows, turn, 0.8)
    assert (np.abs(other - wanted).max(axis=-1) > 1e-3).mean() > 0.5, "any clipping would pass"


def test_directions_are_mixed_evenly():
    """Each channel takes the same share of every eigenvector, so variances of turned rows differ
    little."""
    seen = np.moveaxis(uneven(3), 0, 1)
    turned = np.einsum("tkh,khe->tke", seen, spectral_turn(seen))
    before, after = (np.mean(x**2, axis=0) for x in (seen, turned))
    assert (after.max(axis=1) / after.min(axis=1) < 1.01).all()
    assert (before.max(axis=1) / before.min(axis=1) > 2).all()
