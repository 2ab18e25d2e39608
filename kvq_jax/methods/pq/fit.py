"""The codebooks of product quantization: k-means of each group of channels, for one side of one
layer. NumPy. The same rows give the same arrays.

    minimize  sum_t min_e (x_t - c_e) M (x_t - c_e),    M = E g g^T + 1e-3 tr(.)/d I

over the rows x [tokens, d] of a group, with gradients g of the loss with respect to them. So the
distance is the second-order change of the loss, if groups err independently. The best codeword of a
set of rows is their mean whatever M is. Lloyd's iteration starts from k-means++.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from kvq_jax.codecs.fitting import Rows, check_rows

RIDGE = 1e-3  # of M's mean eigenvalue: directions without a gradient in the text keep some weight
TOKENS = 32  # for each codeword, at most
TURNS = 12


def codebooks(rows: Rows, gradients: Rows, size: int, entries: int) -> dict[str, np.ndarray]:
    """Return codewords [K, H/d, entries, d] float16 and metric [K, H/d, d, d] of groups of d =
    `size` channels."""
    check_rows(rows, gradients, weighted=True)
    x, g = (np.moveaxis(cut(array, size), 0, 2) for array in (rows, gradients))
    metric = np.swapaxes(g, -1, -2) @ g / len(rows)
    mean = np.trace(metric, axis1=-2, axis2=-1)[..., None, None] / size
    metric = metric / np.maximum(mean, 1e-30) + RIDGE * np.eye(size)  # its unit does not matter
    stride = max(1, len(rows) // (TOKENS * entries))
    roots = np.linalg.cholesky(metric)
    codewords = np.empty((*x.shape[:2], entries, size))
    for group in np.ndindex(x.shape[:2]):
        codewords[group] = k_means(x[group][::stride], roots[group], entries)
    limit = float(np.finfo(np.float16).max)
    return {
        "codewords": codewords.clip(-limit, limit).astype(np.float16),
        "metric": metric.astype(np.float32),
    }


def cut(rows: Rows, size: int) -> Float[np.ndarray, "tokens K groups d"]:
    """Return the groups of rows, fp64, in the order of codec.cut."""
    tokens, heads, _ = rows.shape
    split = rows.astype(np.float64).reshape(tokens, heads, 2, -1, size // 2)
    return np.moveaxis(split, 2, 3).reshape(tokens, heads, -1, size)


def k_means(
    x: Float[np.ndarray, "tokens d"], root: Float[np.ndarray, "d d"], entries: int
) -> Float[np.ndarray, "entries d"]:
    """Return the codewords of rows for the distance |(x - c) root|^2. Rows that are fewer than
    codewords are codewords, some of them twice."""
    y = x @ root
    chosen = y[_spread(y, entries)]
    for _ in range(TURNS):
        nearest = np.argmin(np.sum(chosen**2, axis=1) - 2 * y @ chosen.T, axis=1)
        count = np.bincount(nearest, minlength=entries)
        sums = [np.bincount(nearest, column, entries) for column in y.T]
        mean = np.stack(sums, axis=1) / np.maximum(count, 1)[:, None]
        chosen = np.where(count[:, None] > 0, mean, chosen)
    return np.linalg.solve(root.T, chosen.T).T


def _spread(y: Float[np.ndarray, "tokens d"], entries: int) -> Int[np.ndarray, " entries"]:
    """Return tokens drawn by k-means++: each with a probability that is its squared distance from
    those drawn before."""
    rng = np.random.default_rng(0)
    drawn = [int(rng.integers(len(y)))]
    distance = np.full(len(y), np.inf)
    for _ in range(entries - 1):
        distance = np.minimum(distance, np.sum((y - y[drawn[-1]]) ** 2, axis=1))
        total = np.cumsum(distance)
        at = np.searchsorted(total, rng.random() * total[-1], side="right")
        drawn.append(min(int(at), len(y) - 1))
    return np.asarray(drawn)
