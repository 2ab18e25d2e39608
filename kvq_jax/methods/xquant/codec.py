"""XQuant's codecs: rows are layer inputs or their latents, [B, 1, T, C]; keys and values are
rebuilt from them, chunk by chunk.

Another codec, `stored`, stores the rows: in uniform groups, or in full precision if the method runs
without its quantization. The parameters of a layer, by name:

    k, v        `projections.Projection` of each side. `kernel` takes cached rows, [C, K * H]. For
                XQuant's latents, it takes rows times `singular` [C]. `input_kernel` is the model's
                own kernel
    basis       U [D, C], in the latent form of XQuant-CL
    input_norm  [D], and input_eps [], for readings of the residual stream
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.stored import BodySpec
from kvq_jax.arrays.uniform import finite_rows
from kvq_jax.codecs.codec import Codec, MissingInputError, Side, TokensAt
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.codecs.facts import CrossLayer, Facts
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning
from kvq_jax.methods.xquant.projections import (
    Projection,
    factored,
    latents,
    normalized,
    own_parameters,
    project,
    projection,
    right_factors,
    rotated_keys,
    weighted_values,
)
from kvq_jax.types.array_types import Axis, CachedRows, LayerInputs, LayerWeights, RowsBKTH, Tree
from kvq_jax.types.rope import Rope

Reading = Literal["post_norm", "unit_norm", "residual_stream"]


@dataclasses.dataclass(frozen=True)
class OutlierChannel(Codec):
    """The codec `coded`, except that the first channel of each row is kept beside the codes,
    unquantized, as `dtype`. Entries that are not finite count as in `finite_rows`.

    Source: Tomar et al., XQuant, Appendix B.
    """

    coded: Codec
    dtype: str

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return self.coded.rows(params, inputs)

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        exact = (
            Axis("batch", batch),
            Axis("kv_heads", heads),
            Axis("tokens", tokens),
            Axis("none", 1),
        )
        return self.coded.body(batch, heads, tokens), BodySpec(exact, self.dtype)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        rest = self.coded.quantize(params, stats, rows.at[..., 0].set(0), at)
        finite = finite_rows(rows, float(jnp.finfo(self.dtype).max))
        return rest, finite[..., :1].astype(jnp.dtype(self.dtype))

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        coded, exact = body
        rest = self.coded.dequantize(params, stats, coded)
        return jnp.concatenate([exact.astype(rest.dtype), rest[..., 1:]], axis=-1)

    @property
    def facts(self) -> Facts:
        return self.coded.facts  # the first channel is not an outlier: its place is not the data's


@dataclasses.dataclass(frozen=True)
class _XRows(Codec):
    """The part that XQuant and XQuant-CL share: rows x or x U, of `channels` channels, which
    `stored` quantizes. `heads` is K."""

    side: Side
    stored: Codec
    channels: int
    heads: int
    latent: bool

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return self.input_of(inputs)[:, None]

    def input_of(self, inputs: LayerInputs) -> Float[Array, "B T D"]:
        return _required(inputs.x, "x")

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        return jax.tree.map(
            lambda spec: spec.renamed("kv_heads", "none"), self.stored.body(batch, 1, tokens)
        )

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        return self.stored.quantize((), (), rows, at)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return self.stored.dequantize((), (), body)

    @property
    def facts(self) -> Facts:
        stored = self.stored.facts
        return Facts(
            exact=stored.exact,
            form="other",
            joint=self.joint,
            rebuilds=True,
            row_axes=lambda heads, head_dim: (Axis("none", 1), Axis("channels", self.channels)),
            code_layout=stored.code_layout,
            outliers=stored.outliers,
        )

    @property
    def kernels(self) -> Kernels:
        return unserved(
            "keys are rebuilt from the layer's input by matrix products, which XLA does",
            "keys are rebuilt from the layer's input by matrix products, which no CPU kernel does",
        )

    @property
    def learning(self) -> Learning:
        return Learning(weights=self.parameters_of, key=self.key)

    @property
    def joint(self) -> bool:
        """True if both sides are rebuilt from one body."""
        return not self.latent

    @property
    def key(self) -> str:
        """The options that the parameters depend on, as text."""
        return f"latent={str(self.latent).lower()}"

    @abc.abstractmethod
    def parameters_of(self, weights: LayerWeights) -> Tree:
        """Return the arrays that keys and values are rebuilt with."""

    def rebuilt(
        self, arrays: Projection, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        """Return keys after RoPE, or values, fp32."""
        if self.side == "k":
            return rotated_keys(arrays, rows, self.heads, positions, rope)
        return project(arrays, rows, self.heads)


@dataclasses.dataclass(frozen=True)
class XCodec(_XRows):
    """XQuant. It caches the layer's input x (C = D), one body for both sides, or the latents x U_k
    and x U_v (C = min(D, K H)), a body for each."""

    def parameters_of(self, weights: LayerWeights) -> Tree:
        if not self.latent:
            return {"k": projection(weights, "k"), "v": projection(weights, "v")}
        arrays = projection(weights, self.side)
        kernel, singular = right_factors(arrays["kernel"])
        factors = {"input_kernel": arrays["kernel"], "kernel": kernel, "singular": singular}
        return {self.side: arrays | factors}

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        if not self.latent:
            return super().rows(params, inputs)
        return latents(own_parameters(params)[self.side], self.input_of(inputs))

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        arrays = own_parameters(params)[self.side]
        return self.rebuilt(arrays, rows, positions, rope).astype(rows.dtype)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        return weighted_values(
            own_parameters(params)["v"], weights, self.dequantize(params, stats, body)
        )


@dataclasses.dataclass(frozen=True)
class XCrossLayerCodec(_XRows):
    """XQuant-CL, from the base layer on. With the quantizer Q and the accumulator X^, which has D =
    `width` channels:

        base          X^ = Q(X)
        x form        X^_i = X^_{i-1} + Q(X_i - X^_{i-1})
        latent form   X^_i = X^_{i-1} + Q((X_i - X^_{i-1}) U_i) U_i^T
                      [W_k | W_v]_i = U_i S_i B_i^T
        keys, values  X^_i W_k,  X^_i W_v

    Cached rows are X, or X U of min(D, 2 K H) channels: U is linear, so (X - X^) U = X U - X^ U
    does not need X itself. In the latent form `input_kernel` [D, K * H] projects the accumulator.
    X depends on `reading`:

        post_norm        the layer's input x = w h / rms(h)
        unit_norm        h / rms(h), before the layer's own gains w (W_k and W_v take w X)
        residual_stream  h (W_k and W_v take w X / rms(X))
    """

    width: int
    base: bool
    reading: Reading
    accumulator_dtype: str

    @property
    def joint(self) -> bool:
        return True

    @property
    def key(self) -> str:
        return f"{super().key},reading={self.reading}"

    @property
    def facts(self) -> Facts:
        flops = 2 * self.channels * self.width if self.latent else self.width
        cross_layer = CrossLayer(
            self.base, flops, self._accumulator, self._expected, self._accumulated
        )
        return dataclasses.replace(super().facts, cross_layer=cross_layer)

    def _accumulator(self, batch: int, tokens: int) -> BodySpec:
        return BodySpec(
            (Axis("batch", batch), Axis("tokens", tokens), Axis("model", self.width)),
            self.accumulator_dtype,
        )

    def parameters_of(self, weights: LayerWeights) -> Tree:
        k, v = projection(weights, "k"), projection(weights, "v")
        parameters: dict[str, Tree] = {"k": k, "v": v}
        if self.latent:
            gains = weights.input_norm if self.reading == "unit_norm" else None
            basis, fused = factored(k["kernel"], v["kernel"], gains=gains)
            k, v = (
                {**arrays, "kernel": part, "input_kernel": arrays["kernel"]}
                for arrays, part in zip((k, v), fused, strict=True)
            )
            parameters = {"basis": basis, "k": k, "v": v}
        if self.reading != "post_norm":
            parameters |= {"input_norm": weights.input_norm, "input_eps": weights.norm_eps}
        return parameters

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        if self.reading == "unit_norm":
            residual = _required(inputs.residual, "residual")
            eps = own_parameters(params)["input_eps"]
            x = normalized(residual, None, eps).astype(residual.dtype)
        else:
            x = self.input_of(inputs)
        if self.latent:
            basis = own_parameters(params)["basis"]
            x = jnp.einsum(
                "btd,dc->btc", x.astype(basis.dtype), basis, preferred_element_type=jnp.float32
            )
        return x[:, None]

    def input_of(self, inputs: LayerInputs) -> Float[Array, "B T D"]:
        if self.reading == "residual_stream":
            return _required(inputs.residual, "residual")
        return _required(inputs.x, "x")

    def _expected(self, params: Tree, accumulator: Float[Array, "B T D"]) -> CachedRows:
        wide = accumulator.astype(jnp.float32)
        if self.latent:
            wide = jnp.einsum("btd,dc->btc", wide, self._basis(params))
        return wide[:, None]

    def _accumulated(
        self,
        params: Tree,
        accumulator: Float[Array, "B T D"] | Float[Array, ""],
        differences: CachedRows,
    ) -> Float[Array, "B T D"]:
        new = differences[:, 0].astype(jnp.float32)
        if self.latent:
            new = jnp.einsum("btc,dc->btd", new, self._basis(params))
        return accumulator + new

    def _basis(self, params: Tree) -> Float[Array, "D C"]:
        return own_parameters(params)["basis"].astype(jnp.float32)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        parameters = own_parameters(params)
        projected = rows if self.latent else self._projected(parameters, rows)
        return self.rebuilt(parameters[self.side], projected, positions, rope).astype(rows.dtype)

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        arrays, rows = self._from_accumulator(params, body)
        return dot_rows(query, rotated_keys(arrays, rows, self.heads, positions, rope))

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        arrays, rows = self._from_accumulator(params, body)
        return weighted_values(arrays, weights, rows)

    def _from_accumulator(
        self, params: Tree, accumulator: Float[Array, "B T D"]
    ) -> tuple[Projection, CachedRows]:
        """Return this side's projection of the accumulator, and the rows that it projects."""
        parameters = own_parameters(params)
        arrays = parameters[self.side]
        arrays = {**arrays, "kernel": arrays.get("input_kernel", arrays["kernel"])}
        return arrays, self._projected(parameters, accumulator[:, None])

    def _projected(self, parameters: dict[str, Tree], x: CachedRows) -> CachedRows:
        """Return the rows that W_k and W_v are multiplied by, made from X."""
        if self.reading == "residual_stream":
            return normalized(x, parameters["input_norm"], parameters["input_eps"])
        if self.reading == "post_norm":
            return x
        gains = parameters["input_norm"].astype(jnp.float32)
        return x.astype(jnp.float32) * gains[None, None, None]


def _required(rows: Float[Array, "B T D"] | None, name: str) -> Float[Array, "B T D"]:
    if rows is None:
        raise MissingInputError(
            f"this method caches the layer's input and needs {name}: it is None"
        )
    return rows
