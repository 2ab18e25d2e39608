"""OptR's codec: OSCAR's with learned rotations, and keys minus their mean. Equations and
deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.grouped_array import GroupedArray
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.learning import LayerTrace, Learning, required
from kvq_jax.methods.optr import fit
from kvq_jax.methods.optr.fit import Rounding
from kvq_jax.methods.oscar_spectral.codec import SpectralCodec
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, Tree
from kvq_jax.types.rope import Rope


@dataclasses.dataclass(frozen=True)
class OutputAwareCodec(SpectralCodec):
    """Parameters: `turn` [K, H, H], orthogonal, and for keys `mean` [K, H], both fp32.

    The mean is subtracted before keys are rotated. Its share of a score, q . mean, is the same for
    all keys of the body, and is added exactly.
    """

    keys: Rounding = Rounding(2, 128, 0.96)
    values: Rounding = Rounding(2, 128, 0.92)
    base: str = "oscar"
    steps: int = 80

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> GroupedArray:
        if self.side == "k":
            rows = rows.astype(jnp.float32) - _mean(params)
        return super().quantize(params, stats, rows, at)

    def dequantize(self, params: Tree, stats: Tree, body: GroupedArray) -> CachedRows:
        rows = super().dequantize(params, stats, body)
        return rows + _mean(params) if self.side == "k" else rows

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        """Return the rotated queries and their products with the mean."""
        constant = jnp.sum(q.astype(jnp.float32) * _mean(params), axis=-1)
        return super().query(params, stats, q), constant

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        turned, constant = query
        scores = super().scores(params, stats, turned, body, positions, rope)
        return scores + constant[..., None]

    @property
    def learning(self) -> Learning:
        options = "keys", "values", "base", "steps"
        key = ",".join(f"{name}={getattr(self, name)}" for name in options)
        return Learning(self._parameters, fit_to_layer=self._fit_to_layer, key=key)

    def _parameters(self, heads: int) -> dict[str, ArraySpec]:
        described = super()._parameters(heads)
        if self.side == "k":
            axes = Axis("kv_heads", heads), Axis("channels", self.format.channels)
            described["mean"] = ArraySpec(axes, "float32")
        return described

    def _fit_to_layer(self, trace: LayerTrace) -> dict[str, np.ndarray]:
        learned = trace.fitted_keys if self.side == "v" else None
        learned = learned or fit.keys(trace, self.keys, self.base, self.steps)
        if self.side == "k":
            return learned
        return fit.values(trace, learned, self.keys, self.values, self.base, self.steps)


def _mean(params: Tree) -> Float[Array, "1 K 1 H"]:
    params = required(params, "optr needs calibrated means and rotations")
    return params["mean"][None, :, None]
