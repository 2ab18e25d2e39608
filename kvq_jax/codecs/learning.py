"""The parameters of a codec: the arrays that it needs besides the codes, and their sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Shaped

from kvq_jax.types.array_types import ArraySpec, LayerWeights, Tree

Fit = Callable[
    [Float[np.ndarray, "tokens K H"], Float[np.ndarray, "tokens K H"]],
    dict[str, Shaped[np.ndarray, "..."]],
]
# E q q^T of the queries after RoPE that read a KV head
QueryMoments = Float[np.ndarray, "K H H"]
FitToQueries = Callable[
    [Float[np.ndarray, "tokens K H"], Float[np.ndarray, "tokens K H"], QueryMoments],
    dict[str, Shaped[np.ndarray, "..."]],
]


@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """Sequences of S texts through one layer, fp32, for fits that follow attention to its output.

    keys, values: [S, T, K, H], keys after RoPE.
    queries: [S, W, N, H], of the last W tokens, after RoPE.
    moments: [K, H, H], E q q^T of all queries that read a KV head.
    output: [N * H, D], o_proj's weights.
    scale: the factor of the scores.
    sink: the tokens at the front that a cache keeps in full precision.
    fitted_keys: the arrays of the layer's keys, if they were made with the same options before.
    """

    keys: Float[np.ndarray, "S T K H"]
    values: Float[np.ndarray, "S T K H"]
    queries: Float[np.ndarray, "S W N H"]
    moments: QueryMoments
    output: Float[np.ndarray, "NH D"]
    scale: float
    sink: int
    fitted_keys: dict[str, Shaped[np.ndarray, "..."]] | None = None


class Compact(NamedTuple):
    """The arrays that a model carries in place of the calibrated ones, because they are smaller.

    parameters: K -> their descriptions, by name.
    made: the calibrated arrays -> these arrays.
    """

    parameters: Callable[[int], dict[str, ArraySpec]]
    made: Callable[[dict[str, Array]], dict[str, Array]]


FitToLayer = Callable[[LayerTrace], dict[str, Shaped[np.ndarray, "..."]]]
FOR_KERNELS = "kernel_"  # begins the name of a parameter in the dtype that GPU kernels compute with


def _none(heads: int) -> dict[str, ArraySpec]:
    return {}


@dataclasses.dataclass(frozen=True)
class Learning:
    """The source of a codec's parameters: a calibration, the layer's weights, both, or none.

    parameters: K -> the calibrated arrays, by name.
    fit: (rows, gradients of the mean loss with respect to them) -> these arrays, in NumPy.
    fit_to_queries: the same, with the second moment of the queries that read each KV head as a
        third argument. None if it is not needed.
    fit_to_layer: makes the arrays from both sides of a layer, its queries and its output
        projection, in place of `fit`.
    before_rope: the rows that `fit` takes are keys before RoPE.
    bias: (params, H) -> the constant [K, H] fp32 that is subtracted from keys before they are
        cached, or None.
    narrowed: names of parameters that GPU kernels read in another dtype, and that dtype. Cast once,
        when the parameters are attached to a model, they save a step the launches.
    weights: the layer's weights -> parameters that follow from them alone, made once when a model
        is loaded. None if the codec takes none. From descriptions it makes descriptions, and
        weights that are used as they are come back as the same objects.
    brought: True if the model's checkpoint brings the arrays of `parameters`, and no text is
        calibrated on.
    compact: the arrays that a model carries in place of the calibrated ones, or None.
    key: the options that the parameters depend on, as text. Parameters of one key serve every codec
        with that key.
    """

    parameters: Callable[[int], dict[str, ArraySpec]] = _none
    fit: Fit | None = None
    fit_to_queries: FitToQueries | None = None
    fit_to_layer: FitToLayer | None = None
    before_rope: bool = False
    bias: Callable[[Tree, int], Float[Array, "K H"]] | None = None
    narrowed: tuple[tuple[str, str], ...] = ()
    weights: Callable[[LayerWeights], Tree] | None = None
    brought: bool = False
    compact: Compact | None = None
    key: str = ""

    def calibrate(
        self,
        rows: Float[np.ndarray, "tokens K H"],
        gradients: Float[np.ndarray, "tokens K H"],
        moments: QueryMoments | None = None,
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Return the calibrated arrays. Raises ValueError, in one line, if the rows do not
        determine them, or if the fit needs the queries' moments and there are none, and
        NotImplementedError if there is nothing to calibrate."""
        if self.fit_to_queries is not None:
            if moments is None:
                raise ValueError("this method is fitted to queries, and none were recorded")
            return self.fit_to_queries(rows, gradients, moments)
        if self.fit is None:
            raise NotImplementedError("this codec takes no calibration")
        return self.fit(rows, gradients)

    def from_weights(self, weights: LayerWeights) -> Tree:
        """Return the parameters that follow from the layer's weights, `()` if none do."""
        return () if self.weights is None else self.weights(weights)

    def carried(self, heads: int) -> dict[str, ArraySpec]:
        """Describe the arrays of a calibration that a model carries, for K KV heads."""
        return (self.compact.parameters if self.compact else self.parameters)(heads)

    def carry(self, calibrated: dict[str, Array]) -> dict[str, Array]:
        """Return the arrays that a model carries, `carried` and `derived`, of calibrated ones."""
        made = self.compact.made(calibrated) if self.compact else calibrated
        return made | self.derive(calibrated)

    def derived(self, heads: int) -> dict[str, ArraySpec]:
        """Describe the arrays that `derive` returns for K KV heads."""
        described = self.parameters(heads)
        return {
            FOR_KERNELS + name: dataclasses.replace(described[name], dtype=dtype)
            for name, dtype in self.narrowed
        }

    def derive(self, calibrated: dict[str, Array]) -> dict[str, Array]:
        """Return calibrated parameters in the dtypes that GPU kernels read. `params` may hold them
        beside the others."""
        return {FOR_KERNELS + name: calibrated[name].astype(dtype) for name, dtype in self.narrowed}


def required(params: Tree, need: str) -> Tree:
    """Return a codec's parameters. Raise ValueError, with the need and the remedy, if there are
    none."""
    if not params:
        raise ValueError(f"{need}: kvq.parameters.prepare or kvq_models.prepare attaches them")
    return params


def for_kernels(params: Tree) -> Tree:
    """Return the parameters, each in the dtype that GPU kernels read if it was derived."""
    if not isinstance(params, dict):
        return params
    narrow = {
        name.removeprefix(FOR_KERNELS): array
        for name, array in params.items()
        if name.startswith(FOR_KERNELS)
    }
    return params | narrow
