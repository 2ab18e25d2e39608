"""The interface of codecs: how the rows of one side of one layer become a compressed body, and how
attention reads it.

A codec is a frozen dataclass of resolved static values (bits, group size, head dim); its functions
are pure. `params` are the method's parameters for this layer and side (calibrated tables, bases;
`()` for methods without any, see `parameters`), `stats` its prompt statistics (`()` for methods
without any).

Only `rows`, `body`, `outlier_slots`, `quantize` and `dequantize` must be written; attention then
works through `dequantize`. `query`, `scores` and `weighted` exist for codecs whose algebra does
better than dequantizing every element: a scale times a partial dot product, a table look-up shared
by query heads. Accounting, the commands and the kernels ask a codec through the properties at the
end of `Codec`; nobody looks at its class.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.arrays.grouped_array import GroupFormat, Scheme
from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.kernel_writers import KernelWriter
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
from kvq_jax.types.rope import Rope, rotate

Side = Literal["k", "v"]


class KernelJob(NamedTuple):
    """The quantization kernel's job: rows in uniform groups, first divided by `divisor` [B, K, 1,
    H] where one is given."""

    format: GroupFormat
    scheme: Scheme
    divisor: Float[Array, "B K 1 H"] | None


class OutlierCounts(NamedTuple):
    """The numbers of outliers with a slot and without one, of each of n runs of S / n neighbouring
    tokens. A block is whole runs."""

    kept: Int[Array, "B n"]
    dropped: Int[Array, "B n"]


class Codec(abc.ABC):
    """The quantizer of one side (K or V) of one layer's cache. Laws, tested over the method table:

    - `quantize` treats whole blocks independently: quantize(a ++ b) == quantize(a) ++ quantize(b)
      along tokens.
    - Rows of the batch are independent: a prompt has the same codes alone and inside a batch.
    - `scores(query(q), body) == q . vectors(dequantize(body))` and `weighted(p, body) == p .
      vectors(dequantize(body))`,
      to fp32 rounding.

    takes_weights: some of its parameters come from the layer's weights (`from_weights`). rebuilds:
    its rows are not keys or values, but what these are made from with the weights. unprompted: the
    value of every prompt statistic of a row that never had a prompt.
    """

    takes_weights: ClassVar[bool] = False
    rebuilds: ClassVar[bool] = False
    unprompted: ClassVar[float] = 1.0

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class that stores arrays of its own, but inherits the number of outliers among
        them from another class."""
        super().__init_subclass__(**arguments)
        if "body" in vars(cls) and "outlier_slots" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} defines body, so it must define outlier_slots too (return 0 where"
                " it stores no outliers)"
            )

    @property
    def joint(self) -> bool:
        """Return True where both sides share one body, its windows and one tree of parameters,
        which the key side's codec handles."""
        return False

    @property
    def cross_layer(self) -> CrossLayerCodec | None:
        """Return this codec where it builds on the layer below it, else None."""
        return None

    def row_axes(self, heads: int, head_dim: int) -> tuple[Axis, Axis]:
        """Return the axes of a token's cached rows, heads and channels, in a layer with K KV heads
        of H channels."""
        return Axis("kv_heads", heads), Axis("channels", head_dim)

    def row_width(self, heads: int, head_dim: int) -> int:
        """Return the channels of a token's cached rows, its heads together."""
        return math.prod(axis.size for axis in self.row_axes(heads, head_dim))

    @abc.abstractmethod
    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        """Return the rows that are cached for new tokens: in full precision in the windows,
        quantized in the body."""

    @abc.abstractmethod
    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        """Describe the body's arrays for `tokens` tokens, as a tree of `stored.BodySpec`."""

    @abc.abstractmethod
    def outlier_slots(self, heads: int) -> float:
        """Return the number of outliers of a token, over its K heads, that the body can store at
        places chosen by the data: a mean where tokens share slots, and 0 for none."""

    @abc.abstractmethod
    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> Tree:
        """Quantize whole blocks of rows. `prefill` tells prompt tokens from generated ones."""

    def quantize_at(
        self,
        params: Tree,
        stats: Tree,
        rows: CachedRows,
        positions: Int[Array, "B T"],
        *,
        prefill: bool,
    ) -> Tree:
        """Quantize whole blocks of rows, as `quantize` does, by codecs whose codes depend on where
        the tokens stand."""
        return self.quantize(params, stats, rows, prefill=prefill)

    @abc.abstractmethod
    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        """Return the rows that a body stands for, fp32 unless they are stored in full precision."""

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        """Describe what a calibration must put into `params` for K KV heads, by name; empty for
        codecs that need nothing."""
        return {}

    def calibrate(
        self, rows: Float[np.ndarray, "tokens K H"], gradients: Float[np.ndarray, "tokens K H"]
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Fit the parameters to the cached rows of a calibration text and the gradients of the mean
        loss with respect to them.

        Raises ValueError, in one line, where these rows do not determine them; NotImplementedError
        for codecs without parameters to fit.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no calibration")

    def derived_parameters(self, heads: int) -> dict[str, ArraySpec]:
        """Describe what `derive` returns for K KV heads."""
        return {}

    def derive(self, calibrated: dict[str, Array]) -> dict[str, Array]:
        """Return parameters that follow from calibrated ones alone, by name, made once when these
        are attached to a model: `params` may have them beside the others, or not. They save a step
        the launches that would make them anew.
        """
        return {}

    def from_weights(self, weights: LayerWeights) -> Tree:
        """Return the parameters that follow from the layer's weights alone, made once when a model
        is loaded. Where the weights are ShapeDtypeStructs or `ArraySpec` descriptions, so are the
        results. Weights that are used as they are come back as the same objects."""
        return ()

    def calibration_key(self) -> str:
        """Return the options that calibrated parameters depend on, as text: parameters of one key
        serve every codec with that key."""
        return ""

    def weights_key(self) -> str:
        """Return the options that parameters from the layer's weights depend on, as text; empty for
        codecs that take none. A codec that is calibrated too names them in its
        `calibration_key`."""
        return ""

    def prompt_statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        """Return the statistics that the prompt fixes for each batch row, from all its valid
        tokens, those of the sink included: arrays as `statistics_spec` describes them."""
        return ()

    def statistics_spec(self, batch: int, heads: int) -> Tree:
        """Describe the arrays of the prompt statistics, as a tree of `ArraySpec`; `()` for codecs
        without any."""
        return ()

    def initial_statistics(self, batch: int, heads: int) -> Tree:
        """Return the statistics of rows that never had a prompt."""
        specs = self.statistics_spec(batch, heads)
        return jax.tree.map(lambda spec: jnp.full(spec.shape, self.unprompted, spec.dtype), specs)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        """Return keys after RoPE, or values, from cached rows at these positions."""
        return rows

    @property
    def stores_vectors(self) -> bool:
        """Return True where cached rows are keys after RoPE, or values: where `vectors` returns
        them as they are."""
        return type(self).vectors is Codec.vectors

    @property
    def only_rotates(self) -> bool:
        """Return True where cached rows are keys before RoPE, and `vectors` rotates them to their
        positions and does nothing else."""
        return False

    @property
    def stores_rows(self) -> bool:
        """Return True where the body is one array of cached rows as they are, in the dtype of the
        windows."""
        return False

    @property
    def sums_vectors(self) -> bool:
        """Return True where `kernel_sum` returns its argument: where kernels may add vectors of the
        windows to what they sum."""
        return type(self).kernel_sum is Codec.kernel_sum

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        """Return what `scores` needs of the queries, computed once for all chunks. R = G * T query
        rows share a KV head. q is as the model made it: the caller scales the scores by
        1/sqrt(H)."""
        return q

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        """Return q . k for a chunk of the body, fp32."""
        keys = self.vectors(params, self.dequantize(params, stats, body), positions, rope)
        return dot_rows(query, keys)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        """Return weights . v for a chunk of the body, fp32."""
        values = self.vectors(params, self.dequantize(params, stats, body), positions, rope)
        return weigh_rows(weights, values)

    def kernel_reader(self) -> Reader | str:
        """Return the reader with which fused kernels read the body, or one line that says why there
        is none."""
        return f"{type(self).__name__} has no kernel"

    def native_body(self) -> Body | str:
        """Return the description with which C++ kernels read the body, or one line that says why
        there is none."""
        return f"{type(self).__name__} has no CPU kernel"

    def kernel_arrays(self, params: Tree, body: Tree) -> list[Array]:
        """Return the arrays that `kernel_reader` and `native_body` read, in their order."""
        return jax.tree.leaves(body)

    def fused_arrays(self, params: Tree, body: Tree) -> list[Array]:
        """Return what fused kernels read in place of `kernel_arrays`: the same, perhaps in the
        dtype that they compute with."""
        return self.kernel_arrays(params, body)

    def kernel_sum(self, weighted: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
        """Return weights . v from what kernels read in its place, the weighted sum of what the
        body's arrays hold: a linear map."""
        return weighted

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        """Return the job that `pallas_kernels.quantize.kernel` does in place of `quantize`; None
        where it cannot."""
        return None

    def kernel_writer(self, params: Tree, stats: Tree) -> KernelWriter | None:
        """Return what writes blocks in a kernel where there is no `kernel_job`; None where XLA
        does. It writes the leaves of a body's tree in their order."""
        return None

    # Properties that others ask for. A codec that wraps another passes these on; one that stores
    # outliers must define `outlier_counts`.

    @property
    def exact(self) -> bool:
        """Return True where the body holds rows in full precision, so that nothing is quantized."""
        return False

    def unmet(self, heads: int) -> str | None:
        """Return in words what an option asks for and a layer with K KV heads is too small for, and
        the remedy; None where nothing is."""
        return None

    def outlier_counts(self, body: Tree) -> OutlierCounts:
        """Count the outliers of a body, as `quantize` returns it.

        Raises NotImplementedError for a codec that has slots (`outlier_slots`) but does not say
        what is in them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has slots for outliers: define its outlier_counts to count what"
            " they hold"
        )

    @property
    def code_layout(self) -> PlaneLayout | None:
        """Return the layout of the packed codes; None where the body packs none in planes."""
        return None

    @property
    def before_rope(self) -> bool:
        """Return True where rows are keys before RoPE, which `vectors` rotates."""
        return False

    @property
    def channel_group_bits(self) -> int | None:
        """Return the bits of codes in groups of the model's own channels; None for other codecs.

        The channels of such a group share a token's scale, so one channel with a large constant
        makes the steps of all others coarse.
        """
        return None

    @property
    def normalizes_channels(self) -> bool:
        """Return True where rows are divided by a norm of each channel before they are
        quantized."""
        return False

    @property
    def couples_rows(self) -> bool:
        """Return True where what a batch row stores depends on other rows of its batch, so that
        rows cannot be computed apart."""
        return False

    @property
    def couples_heads(self) -> bool:
        """Return True where what a KV head stores depends on other heads, though each has arrays of
        its own."""
        return False

    def subtracted_bias(self, params: Tree, head_dim: int) -> Float[Array, "K H"] | None:
        """Return the constant that is subtracted from keys before RoPE before they are cached,
        fp32; None where nothing is."""
        return None

    def paper_bits(self, width: int, context: int, *, pointers: bool) -> float | None:
        """Return the average bits of an element as the KVQuant paper counts them
        (cache/paper_bits.py) at a KV width and a context; None where its rule says nothing of this
        codec."""
        return None

    def paper_bytes(self, elements: int) -> int | None:
        """Return the bytes of so many elements in the layout that the method's paper counts with;
        None where it is the one stored here."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return the codec's name and its resolved options, those of nested dataclasses included;
        tables and arrays are left out."""
        return {"codec": type(self).__name__, **_plain_fields(self)}


class CrossLayerCodec(Codec):
    """The quantizer of the rows of both sides as their difference from what the layers below
    predict.

    The accumulator, an array [B, S, D] over the body's tokens, flows through the layers as `carry`.
    `body` holds quantized differences, and attention reads the accumulator as it is after this
    layer, so `scores` and `weighted` get a chunk of that in place of the body.
    """

    @property
    def joint(self) -> bool:
        return True

    @property
    def cross_layer(self) -> CrossLayerCodec:
        return self

    @property
    @abc.abstractmethod
    def starts(self) -> bool:
        """Return True in the base layer: no accumulator comes in, one goes out."""

    @property
    @abc.abstractmethod
    def accumulate_flops(self) -> int:
        """Return the FLOPs of adding one token's dequantized differences to the accumulator; a
        multiply-add counts as two."""

    @abc.abstractmethod
    def accumulator(self, batch: int, tokens: int) -> BodySpec:
        """Describe the accumulator [B, S, D] of `tokens` body tokens."""

    @abc.abstractmethod
    def expected(self, params: Tree, accumulator: Float[Array, "B T D"]) -> CachedRows:
        """Return the rows that the layers below predict, fp32: subtracted before quantization and
        added after dequantization."""

    @abc.abstractmethod
    def accumulated(
        self,
        params: Tree,
        accumulator: Float[Array, "B T D"] | Float[Array, ""],
        differences: CachedRows,
    ) -> Float[Array, "B T D"]:
        """Return the accumulator with this layer's dequantized differences added, fp32. The base
        layer's starts as a scalar 0."""


def _plain_fields(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        entry = getattr(value, field.name)
        if dataclasses.is_dataclass(entry):
            plain |= _plain_fields(entry)
        elif isinstance(entry, str | int | float) and field.name != "side":
            plain[field.name] = entry
    return plain


def side_rows(inputs: LayerInputs, side: Side, pre_rope: bool = False) -> RowsBKTH:
    """Return the rows that a method keeps for a side. Raises ValueError, naming them, where the
    caller did not supply them."""
    rows = inputs.v if side == "v" else inputs.k_pre if pre_rope else inputs.k_rot
    if rows is None:
        raise ValueError("this method caches keys before RoPE and needs k_pre: it is None")
    return rows


def rotate_keys(rows: RowsBKTH, positions: Int[Array, "#B T"], rope: Rope | None) -> RowsBKTH:
    """Return keys after RoPE from keys that were cached before it. Raises ValueError without
    `rope`."""
    return rotate(rows, positions, given_rope(rope))


def given_rope(rope: Rope | None) -> Rope:
    """Return `rope`. Raises ValueError where the caller did not supply it."""
    if rope is None:
        raise ValueError("keys cached before RoPE need the model's rope to be read: it is None")
    return rope
