"""OSCAR's codec and its calibration. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray
from kvq_jax.arrays.rotations import rotation
from kvq_jax.arrays.uniform import finite_rows
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.fitting import Rows, check_rows
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning, required
from kvq_jax.codecs.rotating import MAX_ENTRY
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, Tree
from kvq_jax.types.rope import Rope


@dataclasses.dataclass(frozen=True)
class SpectralCodec(GroupedCodec):
    """code * step + zero of the rows x turn, clipped for each token.

    `turn` [K, H, H] is orthogonal, fp32, and the only parameter.

    kept: the share of a token's magnitudes below the one to which it is clipped, 0 for no clipping.
    """

    kept: float = 0.0

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> GroupedArray:
        turned = _times(finite_rows(rows, MAX_ENTRY), turn_of(params))
        if self.kept:
            index = min(int(self.kept * turned.shape[-1]), turned.shape[-1] - 1)
            maximum = jnp.sort(jnp.abs(turned), axis=-1)[..., index, None]
            turned = jnp.clip(turned, -maximum, maximum)
        return grouped_array.quantize(turned, self.format)

    def dequantize(self, params: Tree, stats: Tree, body: GroupedArray) -> CachedRows:
        return _times(grouped_array.dequantize(body), _back(params))

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        return _times(q.astype(jnp.float32), turn_of(params))

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        return dot_rows(query, grouped_array.dequantize(body))

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        return _times(weigh_rows(weights, grouped_array.dequantize(body)), _back(params))

    @property
    def facts(self) -> Facts:
        return dataclasses.replace(super().facts, channel_group_bits=None)

    @property
    def learning(self) -> Learning:
        return Learning(self._parameters, self._fit, key="weights=gradients")

    @property
    def kernels(self) -> Kernels:
        return unserved("no kernel turns queries and sums by a calibrated rotation")

    def _parameters(self, heads: int) -> dict[str, ArraySpec]:
        h = self.format.channels
        axes = Axis("kv_heads", heads), Axis("channels", h), Axis("none", h)
        return {"turn": ArraySpec(axes, "float32")}

    def _fit(self, rows: Rows, gradients: Rows) -> dict[str, np.ndarray]:
        check_rows(rows, gradients, weighted=True)
        if self.side == "k":
            return {"turn": spectral_turn(gradients)}
        weights = np.linalg.norm(gradients.astype(np.float64), axis=-1, keepdims=True)
        return {"turn": spectral_turn(rows * weights)}


def spectral_turn(seen: Rows) -> Float[np.ndarray, "K H H"]:
    """Return the rotation of `turn_of_moment` for E x x^T of these vectors."""
    x = np.moveaxis(seen.astype(np.float64), 1, 0)
    return turn_of_moment(np.swapaxes(x, 1, 2) @ x / x.shape[1])


def turn_of_moment(moment: Float[np.ndarray, "K H H"]) -> Float[np.ndarray, "K H H"]:
    """Return U M for each head: the eigenvectors U of a second moment, by falling eigenvalue, and a
    Hadamard matrix M, which mixes them evenly.

    A column of U has its largest entry positive, so equal moments give equal matrices.
    """
    _, basis = np.linalg.eigh(moment)
    basis = basis[:, :, ::-1]
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=1)[:, None], axis=1)
    return (np.where(largest < 0, -basis, basis) @ rotation(moment.shape[-1]).T).astype(np.float32)


def turn_of(params: Tree) -> Float[Array, "K H H"]:
    """Return the calibrated rotation. Raise ValueError if there is none."""
    return required(params, "this method needs calibrated rotations")["turn"]


def _back(params: Tree) -> Float[Array, "K H H"]:
    return jnp.swapaxes(turn_of(params), 1, 2)


def _times(
    rows: Float[Array, "B K T H"], matrices: Float[Array, "K H H"]
) -> Float[Array, "B K T H"]:
    return jnp.einsum("bkth,khe->bkte", rows, matrices, precision=lax.Precision.HIGHEST)
