"""PolarQuant's options and its key codec. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.arrays import polar_array
from kvq_jax.arrays.grouped_array import resolve_group
from kvq_jax.arrays.polar_array import Cut, Grid, PolarArray, PolarFormat, RadiusScale
from kvq_jax.arrays.uniform import saturation_limit
from kvq_jax.codecs import kernel_readers, kernel_writers, native_bodies
from kvq_jax.codecs.codec import Codec, Side, TokensAt, side_rows
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.codecs.facts import Facts, TokenGroup
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.kernels import Kernels
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.methods.base import Method, Windows, option, scale_dtype_option
from kvq_jax.methods.dense.method import DenseCodec
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, ModelDims, Tree
from kvq_jax.types.rope import Rope

BITS = (1, 2, 3, 4, 5, 6)
GROUP = 128  # as in the paper's m4n4


@dataclasses.dataclass(frozen=True)
class PolarCodec(Codec):
    """Keys after RoPE in polar form. With grid=global the first tokens fix the step of each pair's
    radii."""

    format: PolarFormat

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return side_rows(inputs, "k")

    def body(self, batch: int, heads: int, tokens: int) -> PolarArray:
        return polar_array.specs(self.format, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> PolarArray:
        return polar_array.quantize(
            rows, self.format, stats if self.format.grid == "global" else None
        )

    def dequantize(self, params: Tree, stats: Tree, body: PolarArray) -> CachedRows:
        return polar_array.dequantize(body, stats if self.format.grid == "global" else None)

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Float[Array, "B K R H"],
        body: PolarArray,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        """Return q . k for a chunk of the body, fp32.

        A single query row looks up its products with the angles. Several rows share dequantized
        keys, in two halves, because XLA is slow to join them
        (docs/decisions/queries_and_latents.md).
        """
        step = stats if self.format.grid == "global" else None
        if query.shape[2] == 1:
            return polar_array.row_scores(query, body, step)
        (x, y), (keys_x, keys_y) = jnp.split(query, 2, axis=-1), polar_array.key_halves(body, step)
        return dot_rows(x, keys_x) + dot_rows(y, keys_y)

    @property
    def statistics(self) -> Statistics:
        if self.format.grid == "grouped":
            return Statistics()
        return Statistics(self._steps_spec, self._steps, widens=True)

    @property
    def facts(self) -> Facts:
        grouped = self.format.grid == "grouped"
        return Facts(
            code_layout=self.format.layout,
            token_group=TokenGroup(
                self.format.angle_bits, self.format.group_size if grouped else math.inf
            ),
            requantizes="drifts" if grouped else "exact",
        )

    @property
    def kernels(self) -> Kernels:
        return Kernels(
            self._reader,
            self._native,
            writer=lambda params, stats, prefill: kernel_writers.polar(self.format),
        )

    def _reader(self) -> Reader | str:
        f = self.format
        if f.radius_scale != "linear":
            return "square roots of radii; kernels read radii"
        return kernel_readers.polar(
            f.layout, f.angle_bits, f.group_size, f.scale_dtype, grouped_angles=f.grid == "grouped"
        )

    def _native(self) -> Body | str:
        f = self.format
        grouped, root = f.grid == "grouped", f.radius_scale == "sqrt"
        return native_bodies.polar(
            f.layout, f.angle_bits, f.group_size, f.scale_dtype, grouped_angles=grouped, root=root
        )

    def _steps(self, params: Tree, inputs: LayerInputs) -> Float[Array, "B K 1 pairs"]:
        """Return the step of each pair's radii, fp32.

            step_i = max_t r_ti / (2^radius_bits - 1)   over the valid, finite pairs of the first
                                                        tokens

        The step is 0 if there are no such pairs.
        """
        radius, _, finite = polar_array.to_polar(
            self.rows(params, inputs), saturation_limit(self.format.scale_dtype)
        )
        counted = inputs.valid[:, None, :, None] & finite
        largest = jnp.max(jnp.where(counted, radius, 0), axis=2, keepdims=True)
        return largest / ((1 << self.format.radius_bits) - 1)

    def _steps_spec(self, batch: int, heads: int) -> ArraySpec:
        step = Axis("none", 1), Axis("pairs", self.format.half)
        return ArraySpec((Axis("batch", batch), Axis("kv_heads", heads), *step), "float32")


@dataclasses.dataclass(frozen=True)
class PolarQuant(Method):
    """Keys as the angle and radius of each RoPE pair, values in full precision.

    Source: Wu et al., PolarQuant, section 3.
    """

    name: ClassVar[str] = "polarquant"
    summary: ClassVar[str] = (
        "keys as angle and radius of each RoPE pair; values in full precision, or another method's"
        " (k=polarquant+v=...)"
    )
    source: ClassVar[str] = "PolarQuant (Wu et al. 2025), arXiv:2502.00527"
    keys_only: ClassVar[bool] = True
    declines: ClassVar[frozenset[str]] = frozenset({"rotate"})  # its pairs are those of RoPE
    presets: ClassVar[Mapping[str, str]] = {
        "m4n4": "angle_bits=4,radius_bits=4,group_size=128",
        "m4n2": "angle_bits=4,radius_bits=2,group_size=64",
        "paper-v1": "angle_bits=4,radius_bits=4,grid=global",
    }

    angle_bits: int = option(4, "bits for an angle", choices=BITS)
    radius_bits: int = option(4, "bits for a radius", choices=BITS)
    group_size: int = option(
        GROUP,
        f"tokens that share the steps of a pair's radii and angles (0: {GROUP}, or the largest"
        " divisor below)",
    )
    grid: Grid = option(
        "grouped",
        "grouped: ranges by group. global: angles over the full circle, one step of the radii per"
        " sequence (the paper's first version)",
        choices=("grouped", "global"),
    )
    cut: Cut = option(
        "gap",
        "open a group's circle of angles in its largest gap, or at angle 0",
        choices=("gap", "fixed"),
    )
    radius_scale: RadiusScale = option(
        "linear",
        "equal steps within a group for radii, or for their square roots, which suit a few large"
        " radii",
        choices=("linear", "sqrt"),
    )
    scale_dtype: str = scale_dtype_option("steps and minima")

    def windows(self) -> Windows:
        return Windows(sink=0, recent=0, block=self.group_size or GROUP)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        if side == "v":
            return DenseCodec("v", dims.head_dim, dtype)
        if dims.head_dim % 2:
            raise ValueError(f"head_dim {dims.head_dim} has no pairs: PolarQuant needs an even one")
        for name, value in (("radius_scale", "sqrt"), ("cut", "fixed")):
            if self.grid == "global" and getattr(self, name) == value:
                raise ValueError(
                    f"{name}={value} is for grid=grouped: a global grid has the angles of the"
                    " whole circle and one step of the radii"
                )
        group = block
        if self.grid == "grouped":
            group = resolve_group(self.group_size, block, "the block of tokens", GROUP)
        bits = self.angle_bits, self.radius_bits
        format = PolarFormat(
            *bits,
            dims.head_dim,
            block,
            group,
            self.grid,
            self.cut,
            self.scale_dtype,
            self.radius_scale,
        )
        return PolarCodec(format)
