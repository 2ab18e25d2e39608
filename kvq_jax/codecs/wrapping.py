"""A codec around another one, `inner`: it answers everything as the inner codec does, and derived
classes change what they are about."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.codecs.base import Codec, KernelJob, OutlierCounts
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.types.array_types import (
    ArraySpec,
    Axis,
    CachedRows,
    LayerInputs,
    LayerWeights,
    RowsBKTH,
    Tree,
)
from kvq_jax.types.rope import Rope


@dataclasses.dataclass(frozen=True)
class Wrapping(Codec):
    """The codec `inner` of one side's rows, which belong to that side alone."""

    inner: Codec

    def row_axes(self, heads: int, head_dim: int) -> tuple[Axis, Axis]:
        return self.inner.row_axes(heads, head_dim)

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return self.inner.rows(params, inputs)

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        return self.inner.body(batch, heads, tokens)

    def outlier_slots(self, heads: int) -> float:
        return self.inner.outlier_slots(heads)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> Tree:
        return self.inner.quantize(params, stats, rows, prefill=prefill)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return self.inner.dequantize(params, stats, body)

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        return self.inner.parameters(heads)

    def calibrate(
        self, rows: Float[np.ndarray, "tokens K H"], gradients: Float[np.ndarray, "tokens K H"]
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        return self.inner.calibrate(rows, gradients)

    def derived_parameters(self, heads: int) -> dict[str, ArraySpec]:
        return self.inner.derived_parameters(heads)

    def derive(self, calibrated: dict[str, Array]) -> dict[str, Array]:
        return self.inner.derive(calibrated)

    def calibration_key(self) -> str:
        return self.inner.calibration_key()

    def weights_key(self) -> str:
        return self.inner.weights_key()

    def from_weights(self, weights: LayerWeights) -> Tree:
        return self.inner.from_weights(weights)

    def prompt_statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        return self.inner.prompt_statistics(params, inputs)

    def statistics_spec(self, batch: int, heads: int) -> Tree:
        return self.inner.statistics_spec(batch, heads)

    def initial_statistics(self, batch: int, heads: int) -> Tree:
        return self.inner.initial_statistics(batch, heads)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        return self.inner.vectors(params, rows, positions, rope)

    @property
    def stores_vectors(self) -> bool:
        return self.inner.stores_vectors

    @property
    def only_rotates(self) -> bool:
        return self.inner.only_rotates

    @property
    def sums_vectors(self) -> bool:
        return self.inner.sums_vectors

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        return self.inner.query(params, stats, q)

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        return self.inner.scores(params, stats, query, body, positions, rope)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        return self.inner.weighted(params, stats, weights, body, positions, rope)

    def kernel_reader(self) -> Reader | str:
        return self.inner.kernel_reader()

    def native_body(self) -> Body | str:
        return self.inner.native_body()

    def kernel_arrays(self, params: Tree, body: Tree) -> list[Array]:
        return self.inner.kernel_arrays(params, body)

    def fused_arrays(self, params: Tree, body: Tree) -> list[Array]:
        return self.inner.fused_arrays(params, body)

    def kernel_sum(self, weighted: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
        return self.inner.kernel_sum(weighted)

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        return self.inner.kernel_job(stats, prefill=prefill)

    @property
    def exact(self) -> bool:
        return self.inner.exact

    def unmet(self, heads: int) -> str | None:
        return self.inner.unmet(heads)

    def outlier_counts(self, body: Tree) -> OutlierCounts:
        return self.inner.outlier_counts(body)

    @property
    def code_layout(self) -> PlaneLayout | None:
        return self.inner.code_layout

    @property
    def before_rope(self) -> bool:
        return self.inner.before_rope

    @property
    def channel_group_bits(self) -> int | None:
        return self.inner.channel_group_bits

    @property
    def normalizes_channels(self) -> bool:
        return self.inner.normalizes_channels

    @property
    def couples_rows(self) -> bool:
        return self.inner.couples_rows

    @property
    def couples_heads(self) -> bool:
        return self.inner.couples_heads

    def paper_bits(self, width: int, context: int, *, pointers: bool) -> float | None:
        return self.inner.paper_bits(width, context, pointers=pointers)

    def paper_bytes(self, elements: int) -> int | None:
        return self.inner.paper_bytes(elements)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()
