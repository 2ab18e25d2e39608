"""The matrices of all experts of a layer, packed side by side. Each row of activations meets those
of one expert, and a native kernel reads the chosen experts alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.types.pytree import pytree
from kvq_models.llama.packed_weights import (
    MatrixView,
    PackedMatrix,
    by_kernel,
    by_tiles,
    native_products,
    rounded,
)


@pytree
@dataclasses.dataclass(frozen=True)
class PackedExperts(MatrixView):
    """Matrices [E, I, O] of `count` experts, whose outputs are those of one matrix [I, E O], expert
    by expert. O is a multiple of 32, so that experts share no panel."""

    matrix: PackedMatrix
    count: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]  # counted from the arrays
        inputs, outputs = self.matrix.shape
        return self.count, inputs, outputs // self.count

    def dequantized(self) -> Float[Array, "E I O"]:
        values = self.matrix.dequantized()
        return jnp.moveaxis(values.reshape(len(values), self.count, -1), 1, 0)


def expert_products(
    x: Float[Array, "n I"], chosen: Int[Array, "n"], weights: Sequence[PackedExperts]
) -> list[Float[Array, "n _"]]:
    """Return the product of each row with the matrix of the expert that it chooses, for each of
    several weights."""
    wide = x.astype(jnp.float32)
    return [product.astype(x.dtype) for product in _products(wide, chosen, tuple(weights))]


def _native(
    x: Float[Array, "n I"], chosen: Int[Array, "n"], weights: tuple[PackedExperts, ...]
) -> list[Array]:
    return native_products(x, [w.matrix for w in weights], chosen, weights[0].count)


def _by_xla(
    x: Float[Array, "n I"], chosen: Int[Array, "n"], weights: tuple[PackedExperts, ...]
) -> list[Array]:
    return [_by_expert(x, chosen, w) for w in weights]


_products = by_kernel(_native, _by_xla)


def _by_expert(x: Float[Array, "n I"], chosen: Int[Array, "n"], w: PackedExperts) -> Array:
    """Multiply all rows by each expert's matrix in turn, and keep those that chose it."""
    panels, outputs = w.matrix.codes.shape[0] // w.count, w.shape[2]

    def add(expert: Any, products: Array) -> Array:
        arrays = jax.tree.map(
            lambda array: lax.dynamic_slice_in_dim(array, expert * panels, panels), w.matrix
        )
        one = dataclasses.replace(arrays, outputs=outputs)
        return jnp.where((chosen == expert)[:, None], by_tiles(rounded(x, one), one), products)

    return lax.fori_loop(0, w.count, add, jnp.zeros((len(x), outputs), jnp.float32))
