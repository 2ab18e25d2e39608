"""A small kernel to test the counting with: decode attention over fp16 K and V, unsplit and
unscaled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def dense_attention(
    *,
    batch: int = 8,
    tokens: int = 32768,
    head_dim: int = 128,
    tile: int = 64,
    columns: int = 8,
    warps: int = 1,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Decode attention over fp16 K and V, unsplit and unscaled: the skeleton of a kernel that
    unpacks nothing.
    """

    def kernel(q_ref, k_ref, v_ref, o_ref):
        q = q_ref[...]  # [columns, H]

        def step(i, carry):
            acc, top, total = carry
            k, v = k_ref[pl.ds(i * tile, tile), :], v_ref[pl.ds(i * tile, tile), :]  # [tile, H]
            scores = _dot(k, q, 1, 1)  # [tile, columns]
            new = jnp.maximum(top, jnp.max(scores, 0))
            weights, shrink = jnp.exp2(scores - new[None]), jnp.exp2(top - new)
            return (
                acc * shrink[None] + _dot(v, weights.astype(v.dtype), 0, 0),
                new,
                total * shrink + jnp.sum(weights, 0),
            )

        start = (
            jnp.zeros((head_dim, columns), jnp.float32),
            jnp.full((columns,), -1e30, jnp.float32),
            jnp.zeros((columns,), jnp.float32),
        )
        acc, _, total = lax.fori_loop(0, tokens // tile, step, start)
        o_ref[...] = acc / total[None]

    def block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i: (i, 0, 0))

    def call(q, k, v):
        return pl.pallas_call(
            kernel,
            name="dense_attention",
            grid=(batch,),
            in_specs=[block(columns, head_dim), block(tokens, head_dim), block(tokens, head_dim)],
            out_specs=block(head_dim, columns),
            out_shape=jax.ShapeDtypeStruct((batch, head_dim, columns), jnp.float32),
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=3),
        )(q, k, v)

    rows = jax.ShapeDtypeStruct((batch, tokens, head_dim), jnp.float16)
    return call, (jax.ShapeDtypeStruct((batch, columns, head_dim), jnp.float16), rows, rows)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    return lax.dot_general(
        a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32
    )
