"""A rotation that spreads a large channel of a head over all of them: a Hadamard matrix with random
signs.

    R = (H_{2^m} (x) C_n) diag(signs) / sqrt(2^m n),    2^m n channels, n odd

H is Sylvester's Hadamard matrix. C_n[i, j] = cos(2 pi i j / n) + sin(2 pi i j / n) is the matrix of
the discrete Hartley transform, 1 for n = 1. Both are symmetric and orthogonal up to their size, so
R is orthogonal for every head dim. Every entry of a Hadamard matrix has the same size. The largest
entries of C_n are sqrt(2) times the mean. Signs are bits of SHA-256, the same on every machine and
in every version, because a cache's file depends on them. Source: Ashkboos et al., QuaRot, section
3. Hartley's matrix in place of a table of Hadamard matrices of other sizes is ours.
"""

from __future__ import annotations

import functools
import hashlib

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


@functools.cache
def rotation(channels: int) -> Float[np.ndarray, "H H"]:
    """Return R, fp32. R x for the rows x of an array is `rows @ R.T`."""
    odd = channels
    matrix = np.ones((1, 1))
    while odd % 2 == 0:
        odd, matrix = odd // 2, np.kron(matrix, [[1, 1], [1, -1]])
    angles = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    matrix = np.kron(matrix, np.cos(angles) + np.sin(angles)) / np.sqrt(channels)
    return (matrix * signs(channels)).astype(np.float32)


def signs(count: int) -> Float[np.ndarray, " count"]:
    """Return 1 or -1 for each channel: the first bits of the digests of 0, 1, 2, ..."""
    digests = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(-(-count // 256)))
    return 1 - 2.0 * np.unpackbits(np.frombuffer(digests, np.uint8))[:count]


def turn(rows: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Return R x of each row, fp32."""
    return jnp.matmul(
        rows.astype(jnp.float32), rotation(rows.shape[-1]).T, precision=lax.Precision.HIGHEST
    )


def turn_back(rows: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Return R^T x of each row, fp32: the inverse of `turn`, to fp32 rounding."""
    return jnp.matmul(
        rows.astype(jnp.float32), rotation(rows.shape[-1]), precision=lax.Precision.HIGHEST
    )
