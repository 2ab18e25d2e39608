"""The low-rank part of a block of rows, token factors times channel factors, by subspace iteration.

    E [tokens, channels]  ~  L R^T,    L [tokens, r] orthonormal,  R = E^T L

L spans E (E^T E)^(turns - 1) P for a start P [channels, r], so L R^T is the projection of E to that
span. More turns come nearer to the r largest singular directions. No other L R^T with orthonormal L
in the span is closer to E. Source: Vogels et al., PowerSGD, Algorithm 1; Kang et al., GEAR,
section 3.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# If less than this share of a column is left after projecting out the columns before it, the rest
# is rounding and becomes 0.
DEPENDENT = 1e-5


def factors(
    error: Float[Array, "*batch T H"], start: Float[Array, "*#batch H r"], turns: int
) -> tuple[Float[Array, "*batch T r"], Float[Array, "*batch H r"]]:
    """Return (L, R) of each matrix, fp32. Columns beyond the rank of a matrix are zeros."""
    right = start
    left = jnp.zeros((), jnp.float32)
    for _ in range(turns):
        left = orthonormal(jnp.matmul(error, right, precision=lax.Precision.HIGHEST))
        right = jnp.einsum("...th,...tr->...hr", error, left, precision=lax.Precision.HIGHEST)
    return left, right


def orthonormal(columns: Float[Array, "*batch T r"]) -> Float[Array, "*batch T r"]:
    """Return orthonormal columns of the same span, by Gram and Schmidt, twice for each column.

    A library's QR is not used: XLA's CPU backend hands batches of them to the threads that wait for
    them (docs/decisions/methods.md).
    """
    done: list[Array] = []
    for i in range(columns.shape[-1]):
        column = columns[..., i]
        size = _norm(column)
        for _ in range(2):
            for other in done:
                column = column - other * jnp.sum(other * column, axis=-1, keepdims=True)
        left = _norm(column)
        done.append(jnp.where(left > DEPENDENT * size, column / jnp.where(left == 0, 1, left), 0))
    return jnp.stack(done, axis=-1)


def _norm(column: Float[Array, "*batch T"]) -> Float[Array, "*batch 1"]:
    """Return the Euclidean norm, of numbers of any size."""
    largest = jnp.max(jnp.abs(column), axis=-1, keepdims=True)
    return largest * jnp.sqrt(
        jnp.sum((column / jnp.where(largest == 0, 1, largest)) ** 2, axis=-1, keepdims=True)
    )
