"""Keys and values rebuilt from cached layer inputs, and the matrices for that, made once from a
layer's weights.

    x form        K = x W_k + b_k,               V = x W_v + b_v
    latent form   K = (x U_k) S_k B_k^T + b_k,   W_k = U_k S_k B_k^T (thin SVD), W_v likewise

K is then normalized per head if the model has QK-norm, and rotated. The latent form is exact up to
rounding: the orthonormal columns of U span the columns of W, so U U^T W = W. U is as large as W and
is not kept for a side by itself, since x U = (x W) B / S follows from the model's own projection.
Source: Tomar et al., XQuant, sections 3.1 and 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvq_jax.codecs.codec import Side
from kvq_jax.codecs.learning import required
from kvq_jax.types.array_types import ArrayOrSpec, ArraySpec, Axis, LayerWeights, RowsBKTH, Tree
from kvq_jax.types.rope import Rope, rotate

Projection = Mapping[str, Array]


def own_parameters(params: Tree) -> dict[str, Tree]:
    """Return the parameters. Raise ValueError if there are none."""
    return required(params, "xquant rebuilds keys and values from the layer's weights")


def projection(weights: LayerWeights, side: Side) -> dict[str, ArrayOrSpec]:
    """Return the arrays that turn the layer's input into one side, by name: the model's own, or
    their descriptions.

    kernel: [D, K * H].
    bias: [K * H], if the model has one.
    k_norm, norm_eps: [H] and [], for keys with QK-norm.
    """
    kernel = weights.k_kernel if side == "k" else weights.v_kernel
    bias = weights.k_bias if side == "k" else weights.v_bias
    arrays = {"kernel": kernel}
    if bias is not None:
        arrays["bias"] = bias
    if side == "k" and weights.k_norm is not None:
        arrays |= {"k_norm": weights.k_norm, "norm_eps": weights.norm_eps}
    return arrays


def factored(
    *kernels: Float[ArrayOrSpec, "D _"], gains: Float[ArrayOrSpec, " D"] | None = None
) -> tuple[ArrayOrSpec, tuple[ArrayOrSpec, ...]]:
    """Return (U, parts of S B^T), from the thin SVD of projections side by side: [W_1 | W_2 | ...]
    = U S B^T.

    With gains, diag(gains) W is factored. U is [D, R], R = min(D, sum of widths), and each kernel
    has a part [R, E]. Both have the kernels' dtype and are computed in fp32. The sign of a column
    of U is such that its largest entry is positive, so the same weights give the same factors.
    Structs and descriptions of kernels give structs and descriptions of factors.
    """
    dtype, widths = kernels[0].dtype, [kernel.shape[1] for kernel in kernels]
    if isinstance(kernels[0], ArraySpec):
        return _factor_specs(*(kernel for kernel in kernels if isinstance(kernel, ArraySpec)))
    if isinstance(kernels[0], jax.ShapeDtypeStruct):
        return jax.tree.map(lambda spec: spec.struct, _factor_specs(*map(_described, kernels)))
    matrix = np.concatenate([np.asarray(kernel, np.float32) for kernel in kernels], axis=1)
    if gains is not None:
        matrix *= np.asarray(gains, np.float32)[:, None]
    u, s, bt = _thin_svd(matrix)
    fused = np.split(s[:, None] * bt, np.cumsum(widths)[:-1], axis=1)
    return jnp.asarray(u, dtype), tuple(jnp.asarray(part, dtype) for part in fused)


def right_factors(kernel: Float[ArrayOrSpec, "D E"]) -> tuple[ArrayOrSpec, ArrayOrSpec]:
    """Return (B^T [R, E], S [R]) of the thin SVD W = U S B^T, R = min(D, E).

    B^T has the kernel's dtype and S is fp32, with the signs of `factored`. A struct or a
    description of the kernel gives structs or descriptions.
    """
    if isinstance(kernel, ArraySpec):
        rank = Axis("none", min(kernel.shape))
        return ArraySpec((rank, kernel.axes[1]), kernel.dtype), ArraySpec((rank,), "float32")
    if isinstance(kernel, jax.ShapeDtypeStruct):
        return jax.tree.map(lambda spec: spec.struct, right_factors(_described(kernel)))
    _, s, bt = _thin_svd(np.asarray(kernel, np.float32))
    return jnp.asarray(bt, kernel.dtype), jnp.asarray(s)


def _thin_svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return U, S and B^T; the largest entry of each column of U is positive."""
    u, s, bt = np.linalg.svd(matrix, full_matrices=False)
    signs = np.where(u[np.abs(u).argmax(axis=0), np.arange(u.shape[1])] < 0, -1, 1).astype(
        np.float32
    )
    return u * signs, s, signs[:, None] * bt


def _described(kernel: ArrayOrSpec) -> ArraySpec:
    depth, width = kernel.shape
    return ArraySpec((Axis("none", depth), Axis("none", width)), jnp.dtype(kernel.dtype).name)


def _factor_specs(*kernels: ArraySpec) -> tuple[ArraySpec, tuple[ArraySpec, ...]]:
    """Describe the factors of projections that are themselves only described."""
    depth, dtype = kernels[0].axes[0], kernels[0].dtype
    rank = Axis("none", min(depth.size, sum(kernel.axes[1].size for kernel in kernels)))
    return ArraySpec((depth, rank), dtype), tuple(
        ArraySpec((rank, kernel.axes[1]), dtype) for kernel in kernels
    )


def normalized(
    x: Float[Array, "... C"], scale: Float[Array, " C"] | None, eps: Float[Array, ""]
) -> Float[Array, "... C"]:
    """Return RMSNorm(x) = x / sqrt(mean(x^2) + eps) * scale, fp32, without the last factor if scale
    is None."""
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if scale is None:
        return unit
    return unit * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))


def latents(arrays: Projection, x: Float[Array, "B T D"]) -> Float[Array, "B 1 T R"]:
    """Return x U = (x W) B / S, in the dtype of x.

    Channels whose singular value is 0 are 0, because keys and values do not depend on them.
    Operands of the products have W's dtype.
    """
    kernel, turned, singular = arrays["input_kernel"], arrays["kernel"], arrays["singular"]
    flat = jnp.einsum(
        "btd,de->bte", x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32
    )
    scaled = jnp.einsum(
        "bte,re->btr", flat.astype(turned.dtype), turned, preferred_element_type=jnp.float32
    )
    inverse = jnp.where(singular > 0, 1 / jnp.where(singular > 0, singular, 1), 0)
    return (scaled * inverse[None, None]).astype(x.dtype)[:, None]


def project(
    arrays: Projection, rows: Float[Array, "B 1 T C"], heads: int
) -> Float[Array, "B K T H"]:
    """Return keys before RoPE, or values, fp32: rows W + b (of latents, rows S B^T + b), then
    QK-norm if there is one. Operands of the product have W's dtype."""
    kernel = arrays["kernel"]
    flat = jnp.einsum(
        "btc,ce->bte",
        _scaled(arrays, rows[:, 0]).astype(kernel.dtype),
        kernel,
        preferred_element_type=jnp.float32,
    )
    if "bias" in arrays:
        flat = flat + arrays["bias"].astype(jnp.float32)[None, None]
    batch, tokens, width = flat.shape
    split = jnp.swapaxes(flat.reshape(batch, tokens, heads, width // heads), 1, 2)
    return normalized(split, arrays["k_norm"], arrays["norm_eps"]) if "k_norm" in arrays else split


def rotated_keys(
    arrays: Projection,
    rows: Float[Array, "B 1 T C"],
    heads: int,
    positions: Int[Array, "#B T"],
    rope: Rope | None,
) -> RowsBKTH:
    """Return keys after RoPE, fp32. Raises ValueError without `rope`."""
    if rope is None:
        raise ValueError(
            "keys rebuilt from the layer's input need the model's rope to be rotated: it is None"
        )
    return rotate(project(arrays, rows, heads), positions, rope)


def weighted_values(
    arrays: Projection, weights: Float[Array, "B K R T"], rows: Float[Array, "B 1 T C"]
) -> Float[Array, "B K R H"]:
    """Return weights . v, fp32. Values are linear in the rows, so for few query rows the weighted
    sum is taken first, then projected:

        sum_t p_t (x_t W_v + b_v) = (sum_t p_t x_t) W_v + (sum_t p_t) b_v

    That takes K R C multiplications for each token in place of the C K H that rebuild v. (The paper
    rebuilds V.)
    """
    batch, heads, queries, tokens = weights.shape
    kernel = arrays["kernel"]
    head_dim = kernel.shape[1] // heads
    if queries >= head_dim:
        return jnp.einsum(
            "bkrt,bkth->bkrh",
            weights,
            project(arrays, rows, heads),
            preferred_element_type=jnp.float32,
        )
    flat = weights.reshape(batch, heads * queries, tokens)
    sums = jnp.einsum(
        "bnt,btc->bnc", flat, rows[:, 0].astype(jnp.float32), preferred_element_type=jnp.float32
    )
    sums = _scaled(arrays, sums).reshape(batch, heads, queries, -1).astype(kernel.dtype)
    out = jnp.einsum(
        "bkrc,ckh->bkrh",
        sums,
        kernel.reshape(-1, heads, head_dim),
        preferred_element_type=jnp.float32,
    )
    if "bias" in arrays:
        out = out + jnp.sum(weights, axis=-1, keepdims=True) * arrays["bias"].astype(
            jnp.float32
        ).reshape(1, heads, 1, head_dim)
    return out


def _scaled(arrays: Projection, rows: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
    """Return rows S, fp32, for latents, and other rows as they are."""
    if "singular" not in arrays:
        return rows
    return rows.astype(jnp.float32) * arrays["singular"][None, None]
