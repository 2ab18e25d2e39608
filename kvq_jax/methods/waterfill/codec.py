"""Waterfill's codecs: rows in a calibrated order of channels, in chunks of one width each.
Equations: README.md beside this file."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.arrays import run_array
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.arrays.rotations import rotation, turn, turn_back
from kvq_jax.arrays.run_array import RunArray
from kvq_jax.arrays.uniform import finite_rows
from kvq_jax.codecs import kernel_readers, native_bodies
from kvq_jax.codecs.codec import Side
from kvq_jax.codecs.dots import weigh_rows
from kvq_jax.codecs.fitting import Rows
from kvq_jax.codecs.kernels import Kernels, table_of
from kvq_jax.codecs.learning import Compact, Learning
from kvq_jax.codecs.rotating import MAX_ENTRY
from kvq_jax.codecs.runs import FISHER, RunsCodec, calibrated
from kvq_jax.methods.waterfill import fit, matrices
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, Tree
from kvq_jax.types.rope import Rope


@dataclasses.dataclass(frozen=True)
class KeyCodec(RunsCodec):
    """Keys before RoPE, minus their mean, divided by the deviation of their pair.

    Parameters:

        mean, scale [K, H]    in the model's order
        place [K, H]          the place of each channel among the sorted ones
        energies [K, H/2]     of the sorted pairs

    The mean's share of the scores is exact, because whole keys are rotated.
    """

    side: Side = "k"
    pre_rope: bool = True

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        rows = Axis("kv_heads", heads), Axis("channels", self.format.channels)
        flat = ArraySpec(rows, "float32")
        pairs = ArraySpec((rows[0], Axis("pairs", self.format.channels // 2)), "float32")
        return {"mean": flat, "scale": flat, "place": ArraySpec(rows, "int32"), "energies": pairs}

    def calibrate(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        return fit.keys(rows, gradients)

    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        params = calibrated(params)
        u = (rows - params["mean"][None, :, None]) / params["scale"][None, :, None]
        return _gathered(u, jnp.argsort(params["place"], axis=-1))

    def _kernel_parameters(self, params: Tree) -> list[Array]:
        return [params["place"], params["scale"], params["mean"]]

    def dequantize(self, params: Tree, stats: Tree, body: RunArray) -> CachedRows:
        params = calibrated(params)
        u = run_array.levels(body) * run_array.factor(body.scale)
        u = jnp.pad(u, [(0, 0)] * 3 + [(0, self.format.channels - self.format.stored_channels)])
        return (
            _gathered(u, params["place"]) * params["scale"][None, :, None]
            + params["mean"][None, :, None]
        )


@dataclasses.dataclass(frozen=True)
class EigenCodec(RunsCodec):
    """Rows minus their mean, in the eigenbasis in which errors of equal energy cost the loss the
    same.

    Calibrated parameters, of which a model carries the mean and the matrices in 16 bits:

        mean [K, H]
        analysis, synthesis [K, H, H]    inverses of each other
        energies [K, H]                  of the sorted channels
    """

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        rows = Axis("kv_heads", heads), Axis("channels", self.format.channels)
        flat = ArraySpec(rows, "float32")
        matrix = ArraySpec((*rows, Axis("none", self.format.channels)), "float32")
        return {"mean": flat, "analysis": matrix, "synthesis": matrix, "energies": flat}

    def calibrate(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        return fit.eigenbasis(rows, gradients)

    @property
    def learning(self) -> Learning:
        return dataclasses.replace(super().learning, compact=Compact(self._carried, _compact))

    def _carried(self, heads: int) -> dict[str, ArraySpec]:
        mean = self.parameters(heads)["mean"]
        return {"mean": mean, **matrices.specs(heads, self.format.channels)}

    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        # One entry that is not finite would enter every channel.
        params, finite = calibrated(params), jnp.where(jnp.isfinite(rows), rows, 0)
        return _turned(finite - params["mean"][None, :, None], matrices.analysis(params))

    def dequantize(self, params: Tree, stats: Tree, body: RunArray) -> CachedRows:
        params = calibrated(params)
        u = run_array.levels(body) * run_array.factor(body.scale)
        return self._synthesized(params, u) + params["mean"][None, :, None]

    def _synthesized(
        self, params: Tree, u: Float[Array, "B K T stored"]
    ) -> Float[Array, "B K T H"]:
        return _turned(u, matrices.synthesis(params, self.format.stored_channels))

    def _kernel_parameters(self, params: Tree) -> list[Array]:
        return [matrices.synthesis(params), params["mean"]]


@dataclasses.dataclass(frozen=True)
class EigenKeyCodec(EigenCodec):
    """Keys before RoPE in their eigenbasis. Each is turned back before it is rotated."""

    side: Side = "k"
    pre_rope: bool = True
    fitted_with = f"{FISHER},basis=eigen"

    @property
    def kernels(self) -> Kernels:
        runs, options = (self.format.layouts, self.format.channels), {"pre_rope": True}
        return dataclasses.replace(
            super().kernels,
            reader=functools.partial(kernel_readers.runs, *runs, **options, synthesis=True),
            native=functools.partial(native_bodies.runs, *runs, **options, synthesis=True),
        )


@dataclasses.dataclass(frozen=True)
class ValueCodec(EigenCodec):
    """Values in their eigenbasis. A weighted sum is taken over normalized channels and meets
    `synthesis` once for a chunk of tokens."""

    side: Side = "v"
    pre_rope: bool = False

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        params = calibrated(params)
        scaled = weights * jnp.swapaxes(run_array.factor(body.scale), -1, -2)
        sums = weigh_rows(scaled, run_array.levels(body))
        mean = params["mean"][None, :, None]
        return self._synthesized(params, sums) + jnp.sum(weights, axis=-1, keepdims=True) * mean


@dataclasses.dataclass(frozen=True)
class RotatedValueCodec(RunsCodec):
    """Values in a fixed rotation R, without a mean: u = R v. Channels are alike and close to
    normal, so widths are equal, and no text is needed. The token's scale makes errors orthogonal
    to the value, so that they average out in a weighted sum. Kernels read R^T as the matrix of an
    eigenbasis."""

    side: Side = "v"
    pre_rope: bool = False
    unbiased = True

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        return {}

    def calibrate(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        return {}

    @property
    def learning(self) -> Learning:
        return Learning()

    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        return turn(finite_rows(rows, MAX_ENTRY))

    def dequantize(self, params: Tree, stats: Tree, body: RunArray) -> CachedRows:
        return self._turned_back(run_array.levels(body) * run_array.factor(body.scale))

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        scaled = weights * jnp.swapaxes(run_array.factor(body.scale), -1, -2)
        return self._turned_back(weigh_rows(scaled, run_array.levels(body)))

    def _turned_back(self, u: Float[Array, "B K T stored"]) -> Float[Array, "B K T H"]:
        missing = self.format.channels - self.format.stored_channels
        return turn_back(jnp.pad(u, [(0, 0)] * 3 + [(0, missing)]))

    def _kernel_arrays(self, params: Tree, body: RunArray) -> list[Array]:
        heads, channels = body.scale.shape[1], self.format.channels
        matrix = jnp.broadcast_to(rotation(channels), (heads, channels, channels))
        mean = jnp.zeros((heads, channels), jnp.float32)
        return [*jax.tree.leaves(body), table_of(STEPS[1:]), matrix, mean]


def _compact(parameters: Tree) -> Tree:
    return {"mean": parameters["mean"], **matrices.stored(parameters)}


def _gathered(rows: Float[Array, "B K T H"], index: Int[Array, "K H"]) -> Float[Array, "B K T H"]:
    return jnp.take_along_axis(rows, index[None, :, None], axis=-1)


def _turned(
    rows: Float[Array, "B K T C"], matrices: Float[Array, "K C E"]
) -> Float[Array, "B K T E"]:
    return jnp.einsum("bktc,kce->bkte", rows, matrices, preferred_element_type=jnp.float32)
