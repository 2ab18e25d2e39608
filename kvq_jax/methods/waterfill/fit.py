"""Waterfill's calibration: the weight of each channel, for one side of one layer. NumPy. The same
rows give the same arrays.

With rows x and gradients g of the loss with respect to them, as (mean) E over the tokens of a text,
for each KV head:

    keys, for each RoPE pair i = (h, h + H/2)
        mu = E x,   s_i^2 = E |x_i - mu_i|^2 / 2,   f_i = E |g_i|^2 / 2,   energy_i = f_i s_i^2
    values, and keys in an eigenbasis
        mu = E x,   C = cov(x),   M = E g g^T + 1e-3 tr(.)/H I,   M^1/2 C M^1/2 = B diag(energy) B^T
        analysis = M^1/2 B diag(energy)^-1/2,   synthesis = diag(energy)^1/2 B^T M^-1/2

So a squared error d of a normalized channel changes the loss by about energy * d to second order,
with the loss's Fisher information, and a channel's own variance is 1. Channels are sorted by
energy.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from kvq_jax.codecs.fitting import Rows, check_rows, square_roots

RIDGE = 1e-3  # of M's mean eigenvalue: directions without a gradient in the text keep some weight
FLOOR = 1e-8  # of the largest energy: the least energy of a direction, also if it is constant


def keys(rows: Rows, gradients: Rows) -> dict[str, np.ndarray]:
    """Return the parameters of keys.

    mean, scale: [K, H], in the model's order.
    place: [K, H], a channel's place in the order of energies, the two of a pair side by side.
    energies: [K, H/2], the sorted energies of pairs.
    """
    check_rows(rows, gradients, weighted=True)
    mean = rows.mean(axis=0, dtype=np.float64)
    spread, slope = _pair_energy(rows - mean), _pair_energy(gradients)
    energies = spread * slope
    order = np.argsort(-energies, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    deviation = np.sqrt(np.maximum(spread, FLOOR * max(float(spread.max()), 1e-30)))
    return {
        "mean": mean.astype(np.float32),
        "scale": np.tile(deviation, 2).astype(np.float32),
        "place": np.concatenate([2 * rank, 2 * rank + 1], axis=-1).astype(np.int32),
        "energies": np.take_along_axis(energies, order, axis=-1).astype(np.float32),
    }


def eigenbasis(rows: Rows, gradients: Rows) -> dict[str, np.ndarray]:
    """Return mean [K, H], analysis and synthesis [K, H, H] (rows are multiplied from the left), and
    the sorted energies [K, H]."""
    check_rows(rows, gradients, weighted=True)
    mean = rows.mean(axis=0, dtype=np.float64)
    centred, slopes = (
        np.moveaxis(array.astype(np.float64), 1, 0) for array in (rows - mean, gradients)
    )
    covariance, metric = (
        np.swapaxes(array, 1, 2) @ array / len(rows) for array in (centred, slopes)
    )
    width = rows.shape[-1]
    metric = metric + (RIDGE * np.trace(metric, axis1=1, axis2=2) / width + 1e-30)[
        :, None, None
    ] * np.eye(width)
    root, inverse = square_roots(metric)
    energies, basis = np.linalg.eigh(root @ covariance @ root)
    energies, basis = energies[:, ::-1], basis[:, :, ::-1]
    basis = basis * np.where(
        np.take_along_axis(basis, np.abs(basis).argmax(axis=1)[:, None], axis=1) < 0, -1, 1
    )
    energies = np.maximum(energies, FLOOR * np.maximum(energies[:, :1], 1e-30))
    deviation = np.sqrt(energies)
    return {
        "mean": mean.astype(np.float32),
        "analysis": (root @ basis / deviation[:, None]).astype(np.float32),
        "synthesis": (
            (deviation[:, :, None] * np.swapaxes(basis, 1, 2) @ inverse).astype(np.float32)
        ),
        "energies": energies.astype(np.float32),
    }


def _pair_energy(rows: np.ndarray) -> Float[np.ndarray, "K half"]:
    first, second = np.split(np.square(rows, dtype=np.float64).mean(axis=0), 2, axis=-1)
    return (first + second) / 2
