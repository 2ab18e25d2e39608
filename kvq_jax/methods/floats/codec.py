"""The codec of small floats: elements, scales of blocks, and perhaps one scale of a whole sequence.
Equations: README.md beside this file.

The scale of a sequence multiplies neither keys nor values, but the query and the weighted sum:

    q . (s y) = (s q) . y                 sum_t p_t s y_t = s sum_t p_t y_t
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.arrays import float_array
from kvq_jax.arrays.float_array import MAX_INPUT, FloatArray, FloatFormat
from kvq_jax.arrays.minifloats import decode
from kvq_jax.codecs import native_bodies
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, Tree
from kvq_jax.types.rope import Rope

# A later entry can be this many times larger than the prompt's largest before it saturates.
HEADROOM = 2.0

Scale = Literal["tensor", "head", "none", "checkpoint"]


@dataclasses.dataclass(frozen=True)
class FloatCodec(OneSideCodec):
    """x^ = number(code) * scale of a block * scale of the sequence.

    sequence: "tensor", one scale for all heads of the side of a layer, or "head", one for each,
        both from the first tokens. "checkpoint": the parameter "scale" [K] fp32, for all sequences.
        Or "none".

    The statistics are these scales, [B, K, 1, 1] fp32, at least 1 for rows without a prompt. A
    scale of 0, of zeros alone, counts as 1.
    """

    side: Side
    format: FloatFormat
    sequence: Scale
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> FloatArray:
        return float_array.specs(self.format, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> FloatArray:
        return float_array.quantize(
            self._scaled(params, stats, rows.astype(jnp.float32), divide=True), self.format
        )

    def dequantize(self, params: Tree, stats: Tree, body: FloatArray) -> CachedRows:
        return self._scaled(params, stats, float_array.dequantize(body))

    def query(
        self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]
    ) -> Float[Array, "B K R H"]:
        return self._scaled(params, stats, q.astype(jnp.float32))

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: FloatArray,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        return dot_rows(query, self.vectors(params, float_array.dequantize(body), positions, rope))

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: FloatArray,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        return self._scaled(params, stats, weigh_rows(weights, float_array.dequantize(body)))

    @property
    def statistics(self) -> Statistics:
        if self.sequence in ("none", "checkpoint"):
            return Statistics()
        return Statistics(self._statistics_spec, self._statistics, widens=True)

    @property
    def facts(self) -> Facts:
        element, scales_itself = self.format.element, self.format.scale == "none"
        return dataclasses.replace(
            super().facts,
            code_layout=self.format.layout,
            channel_group_bits=None if scales_itself else element.bits,
            mantissa_bits=element.mantissa if scales_itself else None,
            couples=frozenset(["heads"] if self.sequence == "tensor" else []),
        )

    @property
    def learning(self) -> Learning:
        if self.sequence != "checkpoint":
            return Learning()
        return Learning(
            parameters=lambda heads: {"scale": ArraySpec((Axis("kv_heads", heads),), "float32")},
            brought=True,
            key="scale=checkpoint",
        )

    @property
    def kernels(self) -> Kernels:
        no_gpu = "small floats, which no GPU kernel of kvq reads"
        if self.sequence == "checkpoint":
            return unserved(no_gpu, "scales of a checkpoint, which XLA applies")
        return Kernels(
            lambda: no_gpu,
            functools.partial(native_bodies.floats, self.format, pre_rope=self.pre_rope),
            self._kernel_arrays,
            sum=None if self.sequence == "none" else functools.partial(self._scaled, ()),
        )

    def _kernel_arrays(self, params: Tree, body: FloatArray) -> list[Array]:
        if body.scale is None:
            return [*body.words]
        codes = jnp.arange(1 << self.format.element.bits, dtype=jnp.uint16)
        return [*body.words, decode(codes, self.format.element), body.scale]

    def _statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        """Return s = HEADROOM max|x| / largest, over the valid, finite entries of the first
        tokens."""
        rows = self.rows(params, inputs).astype(jnp.float32)
        counted = inputs.valid[:, None, :, None] & jnp.isfinite(rows)
        axes = (2, 3) if self.sequence == "head" else (1, 2, 3)
        largest = jnp.max(jnp.where(counted, jnp.abs(rows), 0), axis=axes, keepdims=True)
        scale = HEADROOM * jnp.minimum(largest, MAX_INPUT) / self.format.largest
        shape = self._statistics_spec(rows.shape[0], rows.shape[1]).shape
        return jnp.broadcast_to(scale, shape)

    def _statistics_spec(self, batch: int, heads: int) -> ArraySpec:
        return ArraySpec(
            (Axis("batch", batch), Axis("kv_heads", heads), Axis("none", 1), Axis("none", 1)),
            "float32",
        )

    def _scaled(self, params: Tree, stats: Tree, rows: Array, *, divide: bool = False) -> Array:
        if self.sequence == "none":
            return rows
        if self.sequence == "checkpoint":
            scale = params["scale"][None, :, None, None]
        else:
            scale = jnp.where(stats > 0, stats, 1)
        return rows / scale if divide else rows * scale
