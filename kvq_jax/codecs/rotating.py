"""Rotation of rows before they are quantized, so that a few large channels do not make the steps of
all others coarse.

    body = quantize(R k)        q . k = (R q) . (R k)        sum_t p_t v_t = R^T sum_t p_t (R v_t)

R is one orthogonal matrix for all heads (arrays/rotations.py). Attention turns the query, once for
a step, and the weighted sum, once for a chunk of the body or for a kernel's whole sum. Nothing is
stored for it and no cached row is turned back. Keys that are cached before RoPE are the exception:
a rotation of all channels does not commute with RoPE, so each is turned back before it is rotated
to its position. Windows hold rows as they are. Source: Ashkboos et al., QuaRot, section 4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.arrays.rotations import rotation, turn, turn_back
from kvq_jax.arrays.uniform import finite_rows
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.kernels import Kernels, by_xla, unserved
from kvq_jax.codecs.learning import Learning, QueryMoments
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.codecs.wrapper import Wrapper
from kvq_jax.types.array_types import CachedRows, LayerInputs, Tree
from kvq_jax.types.rope import Rope

OPTION = "rotate=true"
# Larger entries saturate before rotation, because one entry becomes a part of every channel.
MAX_ENTRY = 2.0**20
BEFORE_ROPE = f"{OPTION} with keys cached before RoPE, which no kernel turns back"


@dataclasses.dataclass(frozen=True)
class Rotating(Wrapper):
    """The codec `inner`, applied to rotated rows of H channels. Its prompt statistics and its
    calibration see rotated rows."""

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        return self.inner.quantize(params, stats, _turned(rows), at)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return turn_back(self.inner.dequantize(params, stats, body))

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        return self.inner.query(params, stats, turn(q)) if self._commutes else q

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        if self._commutes:
            return self.inner.scores(params, stats, query, body, positions, rope)
        return Codec.scores(self, params, stats, query, body, positions, rope)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        return turn_back(self.inner.weighted(params, stats, weights, body, positions, rope))

    @property
    def statistics(self) -> Statistics:
        return dataclasses.replace(self.inner.statistics, of=self._statistics)

    @property
    def learning(self) -> Learning:
        learning: Learning = self.inner.learning
        if learning.fit_to_layer:  # it would be fitted to rows that are not those that it codes
            raise TypeError(f"{self.inner!r} is fitted to its layer and takes no {OPTION}")
        return dataclasses.replace(
            learning,
            fit=self._fit if learning.fit else None,
            fit_to_queries=self._fit_to_queries if learning.fit_to_queries else None,
            key=f"{learning.key},{OPTION}" if learning.key else "",
        )

    @property
    def kernels(self) -> Kernels:
        """The kernels of `inner`, but none rotates the rows that it would quantize."""
        if not self._commutes:
            return unserved(BEFORE_ROPE)
        kernels: Kernels = self.inner.kernels

        def turned_back(stats: Tree, sums: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
            return turn_back(kernels.summed(stats, sums))

        return dataclasses.replace(kernels, writer=by_xla, sum=turned_back)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe() | {"rotate": True}

    @property
    def _commutes(self) -> bool:
        """True if attention can turn the query and the sum in place of every cached row."""
        return self.inner.facts.form == "vectors"

    def _statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        names = "q_pre", "q_rot", "k_pre", "k_rot", "v"
        arrays = {name: array for name in names if (array := getattr(inputs, name)) is not None}
        turned = {name: _turned(array) for name, array in arrays.items()}
        return self.inner.statistics.of(params, dataclasses.replace(inputs, **turned))

    def _fit_to_queries(
        self,
        rows: Float[np.ndarray, "tokens K H"],
        gradients: Float[np.ndarray, "tokens K H"],
        moments: QueryMoments,
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        r = rotation(rows.shape[-1])
        return self.inner.learning.calibrate(rows @ r.T, gradients @ r.T, r @ moments @ r.T)

    def _fit(
        self, rows: Float[np.ndarray, "tokens K H"], gradients: Float[np.ndarray, "tokens K H"]
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        matrix = rotation(rows.shape[-1]).T
        return self.inner.learning.calibrate(rows @ matrix, gradients @ matrix)


def rotated(codec: Codec) -> Codec:
    """Return the codec for rotated rows, or the codec itself if it keeps rows in full precision."""
    return codec if codec.facts.exact else Rotating(codec)


def _turned(rows: Float[Array, "B heads T H"]) -> Float[Array, "B heads T H"]:
    """Return R x, fp32, of the finite part of rows."""
    return turn(finite_rows(rows, MAX_ENTRY))
