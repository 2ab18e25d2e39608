"""What a method supplies for one side of one layer: how rows become a compressed body, and how attention reads it.

A codec is a frozen dataclass of resolved static values (bits, group size, head dim); its functions are pure. `params` are the method's
parameters for this layer and side (calibrated tables, bases; `()` for methods without any, see `parameters`), `stats` what the prompt
fixed (`()` for methods without prompt statistics).

Only `rows`, `body`, `quantize` and `dequantize` must be written; attention then works through `dequantize`. `query`, `scores` and
`weighted` exist for codecs whose algebra does better than dequantizing every element: a scale times a partial dot product, a table
look-up shared by query heads.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.array_types import LayerInputs, LayerWeights, RowsBKTH, Tree
from kvq_jax.arrays.grouped_array import GroupFormat, Scheme
from kvq_jax.arrays.stored import Leaf
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.rope import Rope, rotate

if TYPE_CHECKING:
    from kvq_jax.codecs.kernel_readers import Side as KernelSide

Side = Literal["k", "v"]


class KernelJob(NamedTuple):
    """Rows in uniform groups, divided by `divisor` [B, K, 1, H] before they are coded where it is given."""

    format: GroupFormat
    scheme: Scheme
    divisor: Float[Array, "B K 1 H"] | None


class Codec(abc.ABC):
    """One side (K or V) of one layer's cache. Laws, tested over the method table:

    - `quantize` codes whole blocks independently: quantize(a ++ b) == quantize(a) ++ quantize(b) along tokens.
    - Rows of the batch are independent: a prompt has the same codes alone and inside a batch.
    - `scores(query(q), body) == q . vectors(dequantize(body))` and `weighted(p, body) == p . vectors(dequantize(body))`,
      to fp32 rounding.

    takes_weights: some of its parameters come from the layer's weights (`from_weights`). rebuilds: its rows are no keys or values, which
    are made from them and the weights.
    """

    takes_weights: ClassVar[bool] = False
    rebuilds: ClassVar[bool] = False

    @property
    def joint(self) -> bool:
        """Whether both sides share one body and its windows, which the key side's codec quantizes, and one tree of parameters."""
        return False

    def row_shape(self, heads: int, head_dim: int) -> tuple[int, int]:
        """(heads, channels) of the cached rows in a layer with K KV heads of H channels."""
        return heads, head_dim

    @abc.abstractmethod
    def rows(self, params: Tree, inputs: LayerInputs) -> RowsBKTH:
        """What is cached for new tokens: exact in the windows, coded in the body."""

    @abc.abstractmethod
    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        """The body's arrays for `tokens` tokens, as a tree of `body.Leaf`."""

    @abc.abstractmethod
    def quantize(self, params: Tree, stats: Tree, rows: RowsBKTH, *, prefill: bool) -> Tree:
        """Codes whole blocks of rows. `prefill` tells prompt tokens from generated ones."""

    @abc.abstractmethod
    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> RowsBKTH:
        """The rows that a body stands for, fp32 unless stored exactly."""

    def parameters(self, heads: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what `params` must hold for K KV heads, by name; empty for codecs that need nothing."""
        return {}

    def calibrate(
        self, rows: Float[np.ndarray, "tokens K H"], gradients: Float[np.ndarray, "tokens K H"]
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The parameters, from what `rows` gave for tokens of a calibration text and the gradient of the mean loss with respect to it.
        ValueError, in one line, where they cannot be had from these rows."""
        raise NotImplementedError(f"{type(self).__name__} takes no calibration")

    def from_weights(self, weights: LayerWeights) -> Tree:
        """The parameters that follow from the layer's weights alone, made once when a model is loaded. Where the weights are
        ShapeDtypeStructs, so are the results. Weights that are used as they are come back as the same arrays."""
        return ()

    def calibration_key(self) -> str:
        """The options that calibrated parameters depend on, as text: parameters of one key serve every codec with that key."""
        return ""

    def weights_key(self) -> str:
        """The options that parameters from the layer's weights depend on, as text; empty for codecs that take none. A codec that is
        calibrated too names them in its `calibration_key`."""
        return ""

    def prompt_statistics(self, params: Tree, inputs: LayerInputs, first: int) -> Tree:
        """What the prompt fixes for a row of the batch, from its valid tokens at positions >= first. Leaves have a leading batch axis."""
        return ()

    def initial_statistics(self, batch: int, heads: int) -> Tree:
        """The statistics of a row that never had a prompt."""
        return ()

    def vectors(self, params: Tree, rows: RowsBKTH, positions: Int[Array, "B T"], rope: Rope | None) -> RowsBKTH:
        """Keys after RoPE, or values, from cached rows at these positions."""
        return rows

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        """What `scores` needs of the queries, computed once for all chunks. R = G * T query rows share a KV head. q is as the model made
        it: the caller scales the scores by 1/sqrt(H)."""
        return q

    def scores(
        self, params: Tree, stats: Tree, query: Tree, body: Tree, positions: Int[Array, "B C"], rope: Rope | None
    ) -> Float[Array, "B K R C"]:
        """q . k for a chunk of the body, fp32."""
        keys = self.vectors(params, self.dequantize(params, stats, body), positions, rope)
        return dot_rows(query, keys)

    def weighted(
        self, params: Tree, stats: Tree, weights: Float[Array, "B K R C"], body: Tree, positions: Int[Array, "B C"], rope: Rope | None
    ) -> Float[Array, "B K R H"]:
        """weights . v for a chunk of the body, fp32."""
        values = self.vectors(params, self.dequantize(params, stats, body), positions, rope)
        return weigh_rows(weights, values)

    def kernel_side(self) -> KernelSide | str:
        """What fused kernels read the body with, or one line that says why there is none."""
        return f"{type(self).__name__} has no kernel"

    def kernel_arrays(self, params: Tree, body: Tree) -> list[Array]:
        """The arrays that the kernel's side reads, in its order."""
        return jax.tree.leaves(body)

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        """What `pallas_kernels.quantize.kernel` is to do; None where `quantize` has no kernel."""
        return None


class CrossLayerCodec(Codec):
    """A joint codec whose rows are coded as the difference from what the layers below already say of them.

    The accumulator, an array [B, S, D] over the body's tokens, flows through the layers as `carry`. `body` holds coded differences, and
    attention reads the accumulator as it is after this layer, so `scores` and `weighted` get a chunk of that in place of the body.
    """

    @property
    def joint(self) -> bool:
        return True

    @property
    @abc.abstractmethod
    def starts(self) -> bool:
        """True in the base layer: no accumulator comes in, one goes out."""

    @abc.abstractmethod
    def accumulator(self, batch: int, tokens: int) -> Leaf:
        """The accumulator of `tokens` body tokens; its token axis is 1."""

    @abc.abstractmethod
    def expected(self, params: Tree, accumulator: Float[Array, "B T D"]) -> RowsBKTH:
        """The rows as the layers below tell them, fp32: what is subtracted before coding and added after decoding."""

    @abc.abstractmethod
    def accumulated(self, params: Tree, accumulator: Float[Array, "B T D"], differences: RowsBKTH) -> Float[Array, "B T D"]:
        """The accumulator with this layer's decoded differences added, fp32."""


def side_rows(inputs: LayerInputs, side: Side, pre_rope: bool = False) -> RowsBKTH:
    """The rows that a method keeps for a side; an error names what the caller did not supply."""
    rows = inputs.v if side == "v" else inputs.k_pre if pre_rope else inputs.k_rot
    if rows is None:
        raise ValueError("this method caches keys before RoPE and needs k_pre: it is None")
    return rows


def rotate_keys(rows: RowsBKTH, positions: Int[Array, "B T"], rope: Rope | None) -> RowsBKTH:
    """Keys after RoPE from keys that were cached before it."""
    if rope is None:
        raise ValueError("keys cached before RoPE need the model's rope to be read: it is None")
    return rotate(rows, positions, rope)
