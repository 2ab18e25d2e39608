"""SQuat's matrices. They come from a prompt's queries and correct the channels that are not
quantized yet.

With the queries of one KV head as the rows of Q, its r largest singular values S and right singular
vectors V [r, H]:

    Q^ = diag(S) V,    P = I + lam Q^^T Q^
    P^-1 = I - V^T diag(lam S^2 / (1 + lam S^2)) V                      (Woodbury)

Once channels tg .. (t+1)g - 1 have taken the error d, the others move by the d' that minimizes
|(d, d')|_P (Proposition 1, Lemma 2):

    d' = B_t H_t d

with A_t, B_t the upper and lower left blocks of P^-1, and H_t the last g columns of A_t^-1.

With the Cholesky factor P^-1 = L L^T and the blocks of g channels that L falls into,

    B_t H_t = L[after t, t] L[t, t]^-1

because A_t = L_A L_A^T and B_t = L_B L_A^T, so B_t A_t^-1 = L_B L_A^-1, whose last g columns see
only the last block of L_A. So one factorization gives what Lemma 3 finds step by step, in O(H^3).
Source: Wang et al., SQuat, section 3.3 and Appendix B.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kvq_jax.types.array_types import LengthsB
from kvq_jax.types.rope import Rope, cosines_and_sines

QUERY_CHUNK = 1024  # tokens of a prompt whose queries are widened to fp32 at a time
# Bounds lam S^2: an error along such a direction is cut to 1e-5 of itself, and P^-1 can still be
# factored in fp32.
MAX_WEIGHT = 1e5


def gram(
    queries: Float[Array, "B N T H"], counted: Bool[Array, "B T"], heads: int
) -> Float[Array, "B K H H"]:
    """Return Q^T Q, fp32, over the counted tokens and the N / K query heads of a KV head. Entries
    that are not finite count as 0."""
    batch, all_heads, tokens, head_dim = queries.shape
    rows = queries.reshape(batch, heads, all_heads // heads, tokens, head_dim)
    chunk = min(tokens, QUERY_CHUNK)

    def add(i: Array, total: Array) -> Array:
        # The last chunk starts early and leaves out the tokens that were counted before.
        i = jnp.asarray(i, jnp.int32)  # int64 if jax_enable_x64 is set, an int under disable_jit
        at = jnp.minimum(i * chunk, tokens - chunk)
        part = lax.dynamic_slice_in_dim(rows, at, chunk, 3).astype(jnp.float32)
        new = (at + jnp.arange(chunk, dtype=jnp.int32) >= i * chunk)[None]
        use = lax.dynamic_slice_in_dim(counted, at, chunk, 1) & new
        part = jnp.where(use[:, None, None, :, None] & jnp.isfinite(part), part, 0)
        return total + jnp.einsum("bkgth,bkgti->bkhi", part, part, precision=lax.Precision.HIGHEST)

    return lax.fori_loop(
        0, -(-tokens // chunk), add, jnp.zeros((batch, heads, head_dim, head_dim), jnp.float32)
    )


def turned(
    matrix: Float[Array, "B K H H"], first: LengthsB, ahead: int, rope: Rope
) -> Float[Array, "B K H H"]:
    """Return the mean of R(p) Q^T Q R(p)^T over the positions p = first .. first + ahead - 1. Q
    holds queries before RoPE.

    With z_i = q_i + i q_{i+H/2}, RoPE is z_i e^{i p w_i}. So sum z_i conj(z_j) and sum z_i z_j,
    which hold the same numbers as Q^T Q, are multiplied by the means of e^{i p (w_i - w_j)} and of
    e^{i p (w_i + w_j)}.
    """
    # [B, ahead, H/2]
    turns = lax.complex(
        *cosines_and_sines(first[:, None] + jnp.arange(ahead, dtype=jnp.int32)[None], rope)
    )
    less, more = (
        _product("bpi,bpj->bij", turns, other)[:, None] / ahead
        for other in (jnp.conj(turns), turns)
    )
    half = matrix.shape[-1] // 2
    xx, xy, yx, yy = (matrix[..., i : i + half, j : j + half] for i in (0, half) for j in (0, half))
    difference, total = less * lax.complex(xx + yy, yx - xy), more * lax.complex(xx - yy, yx + xy)
    upper = jnp.concatenate([total.real + difference.real, total.imag - difference.imag], axis=-1)
    lower = jnp.concatenate([total.imag + difference.imag, difference.real - total.real], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2) / 2


def corrections(
    matrix: Float[Array, "B K H H"], rank: int, lam: float, block: int
) -> Float[Array, "B K later earlier"]:
    """Return all matrices B_t H_t (`updates`) for the `rank` largest directions of Q^T Q.

    On CPUs they are computed for one batch row and head after the other. JAX 0.10 hands the
    matrices of a batch to the very threads that wait for them, and prefills of several rows and
    layers never returned (docs/decisions/methods.md).
    """

    def updates_of(matrix: Array) -> Array:
        return updates(*directions(matrix, rank), lam, block)

    def one_by_one(matrix: Array) -> Array:
        matrices = lax.map(updates_of, matrix.reshape(-1, 1, 1, *matrix.shape[2:]))
        return matrices.reshape(*matrix.shape[:2], *matrices.shape[3:])

    return lax.platform_dependent(matrix, cpu=one_by_one, default=updates_of)


def directions(
    matrix: Float[Array, "B K H H"], rank: int
) -> tuple[Float[Array, "B K r"], Float[Array, "B K H r"]]:
    """Return (S^2 in descending order, V^T): the largest eigenvalues of Q^T Q and their
    eigenvectors, which are Q's squared singular values and right singular vectors.

    Exact up to fp32 for every spectrum, because all eigenvectors are computed
    (docs/decisions/methods.md).
    """
    values, vectors = jnp.linalg.eigh(matrix)
    return jnp.maximum(values[..., : -rank - 1 : -1], 0), vectors[..., : -rank - 1 : -1]


def updates(
    values: Float[Array, "B K r"], vectors: Float[Array, "B K H r"], lam: float, block: int
) -> Float[Array, "B K later earlier"]:
    """Return all B_t H_t in one array, fp32.

    Entry [h - block, c] is the share of an error of channel c that is added to channel h of a later
    block. It is 0 if h is in the same block or an earlier one. The columns are the channels of all
    blocks but the last. All entries are 0, so nothing is corrected, if the matrices cannot be
    computed in fp32.
    """
    head_dim = vectors.shape[-2]
    weights = jnp.minimum(lam * values, MAX_WEIGHT)
    shrink = _product("bkhr,bkr,bkir->bkhi", vectors, weights / (1 + weights), vectors)
    factor = jnp.linalg.cholesky(jnp.eye(head_dim, dtype=jnp.float32)[None, None] - shrink)
    columns = []
    for start in range(0, head_dim - block, block):
        end = start + block
        diagonal, below = factor[:, :, start:end, start:end], factor[:, :, end:, start:end]
        moved = lax.linalg.triangular_solve(diagonal, below, left_side=False, lower=True)
        columns.append(jnp.pad(moved, ((0, 0), (0, 0), (start, 0), (0, 0))))
    matrices = jnp.concatenate(columns, axis=-1)
    return jnp.where(jnp.all(jnp.isfinite(matrices), axis=(-2, -1), keepdims=True), matrices, 0)


def _product(equation: str, *factors: Array) -> Array:
    """Return the einsum in full fp32. By default a GPU would round the factors to 10 bits."""
    return jnp.einsum(equation, *factors, precision=lax.Precision.HIGHEST)
