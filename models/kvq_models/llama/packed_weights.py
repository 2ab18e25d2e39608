"""Weights that stay packed: a matrix of codes of 4 or 8 bits, or of numbers of 16, and a table of
rows made of one.

A model's weight is an array or one of these. The model multiplies by `x @ weight`, looks rows up by
`rows_of`, and does not ask which it has. `dense` returns the array for everything else.

Source: the blocks of GGUF files, codes of Hugging Face checkpoints (gguf_blocks.py) and tensors of
16 bits, whose values are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Shaped, UInt8

from cpu_kernels.library import unavailable
from cpu_kernels.packed_product import PANEL, packed_products
from kvq_jax.types.pytree import pytree

# shift of each input's bits within its word, [1, 1, half, 1, byte, 1]
_SHIFTS = (4 * np.arange(2)[:, None] + 8 * np.arange(4)).astype(np.uint32)[
    None, None, :, None, :, None
]
TILE = 2048  # outputs that XLA dequantizes at a time
_BITS = {  # bits of a code by its dtype
    "uint32": 4,
    "int8": 8,
    "float8_e4m3fn": 8,
    "bfloat16": 16,
    "float16": 16,
}
_INPUTS = {4: 8, 8: 4, 16: 1}  # inputs by bits, in an entry of the second axis of codes
# twice each number of 4 bits (E2M1)
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

Activations: TypeAlias = Literal["float32", "int8"]


class PackedWeight:
    """The side of a weight that looks like an array."""

    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def dequantized(self) -> Array:
        """Return the weight's values."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Return the weight itself for `...`, with which flax reads a Param."""
        if index is not ...:
            raise TypeError(
                "a packed weight has no entries to index: make it an array by"
                " kvq_models.llama.packed_weights.dense"
            )
        return self


class ProductWeight(PackedWeight):
    """A matrix [I, O] that rows of activations are multiplied by. value_dtype: of `dequantized`."""

    codes: Array
    value_dtype: str

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.value_dtype)

    @property
    def sharding(self) -> Any:
        return None if isinstance(self.codes, Tracer) else self.codes.sharding

    @staticmethod
    def of_rows(x: Float[Array, "T I"], weights: tuple[Any, ...]) -> list[Float[Array, "T _"]]:
        """Return x w in fp32 for each w of this class."""
        raise NotImplementedError

    @classmethod
    def products(
        cls, x: Float[Array, "... I"], weights: tuple[Any, ...]
    ) -> list[Float[Array, "... _"]]:
        """Return x @ w in fp32 for each w of this class."""
        by_matrix = cls.of_rows(x.reshape(-1, x.shape[-1]).astype(jnp.float32), weights)
        return [product.reshape(*x.shape[:-1], -1) for product in by_matrix]

    def product(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Return x @ w in fp32."""
        return self.products(x, (self,))[0]

    def __rmatmul__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return self.product(x).astype(x.dtype)


@pytree
@dataclasses.dataclass(frozen=True)
class PackedMatrix(ProductWeight):
    """A matrix [I, O] of codes, whose scales and minima are shared by groups of inputs:

        w[i, o] = (code[i, o] - centre) scale[i // group, o] + min[i // group, o]

    in fp32. Output o lies in lane o % 32 of panel o // 32. Everything behind the last output is 0.

        codes          int8 or FP8 [P, I / 4, 32, 4]; or of 4 bits, eight in a word, uint32
                       [P, I / 8, 32]: bits 8 b + 4 h of word 4 r + w are those of input
                       32 r + 16 h + 4 w + b; or the values, bfloat16 or float16 [P, I, 32],
                       without scales
        scales         float16, bfloat16 or float32 [P, I / group, 32], or int8 factors of
                       coarse_scales, or uint8 e of MXFP4: 2^(e - 128) times twice the number
                       (E2M1) of a code
        coarse_scales  float16 [P, I / 256, 32], or None
        mins           as scales, or int8 factors of the scales, or None for 0
        coarse_mins    as coarse_scales, or None
        outputs        O; P = ceil(O / 32)
        centre         the code that stands for 0; 0 for 8 bits
        levels         what the 16 codes of 4 bits stand for (NF4), or None for integers
        value_dtype    of `dequantized` and `rows`
        activations    "float32", or "int8": products with integers round x to 8 bits, by group

    x @ w is a native kernel on a CPU. Elsewhere XLA dequantizes tiles. Products are as exact as
    sums of fp32 numbers, but for that rounding. There is no gradient.
    """

    codes: Shaped[Array, "P _ 32 ..."]
    scales: Shaped[Array, "P groups 32"] | None = None
    coarse_scales: Float[Array, "P _ 32"] | None = None
    mins: Shaped[Array, "P groups 32"] | None = None
    coarse_mins: Float[Array, "P _ 32"] | None = None
    outputs: int = dataclasses.field(default=0, metadata={"static": True})
    centre: int = dataclasses.field(default=0, metadata={"static": True})
    levels: tuple[float, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    value_dtype: str = dataclasses.field(default="float32", metadata={"static": True})
    activations: Activations = dataclasses.field(default="float32", metadata={"static": True})

    @property
    def bits(self) -> int:
        return _BITS[self.codes.dtype.name]

    @property
    def integers(self) -> bool:
        """True if codes are integers, or numbers that are multiples of one (MXFP4)."""
        return self.levels is None and jnp.issubdtype(self.codes.dtype, jnp.integer)

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # counted from the arrays
        return self.codes.shape[1] * _INPUTS[self.bits], self.outputs

    @staticmethod
    def of_rows(x: Float[Array, "T I"], weights: tuple[Any, ...]) -> list[Float[Array, "T _"]]:
        return _of_rows(x, weights)

    def dequantized(self) -> Float[Array, "I O"]:
        values = jnp.swapaxes(_values(self), 0, 1)  # [I, P, 32]
        return values.reshape(values.shape[0], -1)[:, : self.outputs].astype(self.dtype)

    def columns(self, outputs: Int[Array, "..."]) -> Float[Array, "... I"]:
        """Return columns of w. Outputs must be in range."""
        flat = outputs.reshape(-1)
        chosen = jax.tree.map(
            lambda array: jnp.expand_dims(array[flat // PANEL, :, flat % PANEL], 2), self
        )
        values = _values(chosen)[..., 0].astype(self.dtype)
        return values.reshape(*outputs.shape, -1)


class MatrixView(PackedWeight):
    """Another view of a packed matrix as a weight."""

    matrix: PackedMatrix

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.dtype

    @property
    def sharding(self) -> Any:
        return self.matrix.sharding

    @property
    def bits(self) -> int:
        return self.matrix.bits

    @property
    def integers(self) -> bool:
        return self.matrix.integers

    @property
    def activations(self) -> Activations:
        return self.matrix.activations

    def columns(self, outputs: Int[Array, "..."]) -> Float[Array, "... I"]:
        """Return columns of the matrix. Outputs must be in range."""
        return self.matrix.columns(outputs)


@pytree
@dataclasses.dataclass(frozen=True)
class PackedTable(MatrixView):
    """A table [V, D], such as an embedding: the transpose of `matrix` [D, V].

    Its T is the matrix, so that x @ table.T are logits.
    """

    matrix: PackedMatrix

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # counted from the arrays
        return self.matrix.shape[1], self.matrix.shape[0]

    @property
    def T(self) -> PackedMatrix:
        return self.matrix

    def rows(self, indices: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Return rows, and NaN for indices that are out of range."""
        inside = (indices >= 0) & (indices < self.shape[0])
        rows = self.matrix.columns(jnp.where(inside, indices, 0))
        return jnp.where(inside[..., None], rows, jnp.nan)

    def dequantized(self) -> Float[Array, "V D"]:
        return self.matrix.dequantized().T


Weight: TypeAlias = Array | PackedWeight


def is_packed(weight: Any) -> bool:
    return isinstance(weight, PackedWeight)


def dense(weight: Any) -> Any:
    """Return a weight as an array. An array, or the description of one, is returned as it is."""
    return _dequantized(weight) if is_packed(weight) else weight


@jax.jit  # operation by operation, a model's fingerprint takes ten times as long
def _dequantized(weight: PackedWeight) -> Array:
    return weight.dequantized()


def rows_of(table: Any, indices: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Return rows of a table, and NaN for indices that are out of range."""
    if isinstance(table, PackedTable):
        return table.rows(indices)
    return table.at[indices].get(mode="fill", wrap_negative_indices=False)


def logits_of(x: Float[Array, "B T D"], weight: Any, *, tied: bool) -> Float[Array, "B T V"]:
    """Return x @ weight, fp32, of a head [D, V], or of a tied embedding [V, D]."""
    if is_packed(weight):
        return (weight.T if tied else weight).product(x)
    equation = "btd,vd->btv" if tied else "btd,dv->btv"
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)


def _values(w: PackedMatrix) -> Float[Array, "P I lanes"]:
    """Return the values by panel, fp32. Every product of a code and a scale is exact."""
    if w.scales is None:
        return w.codes.astype(jnp.float32)
    if w.bits == 4:
        panels, words, lanes = w.codes.shape
        packed = w.codes.reshape(panels, words // 4, 1, 4, 1, lanes)
        codes = (packed >> jnp.asarray(_SHIFTS)) & 15
        codes = codes.reshape(panels, 8 * words, lanes).astype(jnp.int32) - w.centre
    else:
        codes = jnp.moveaxis(w.codes, 3, 2)
        codes = codes.reshape(codes.shape[0], -1, codes.shape[3])
    e2m1 = w.scales.dtype == jnp.uint8
    table = _TWICE_E2M1 if e2m1 else None if w.levels is None else np.array(w.levels, np.float32)
    values = codes.astype(jnp.float32) if table is None else jnp.asarray(table)[codes]
    by_group = values.reshape(values.shape[0], w.scales.shape[1], -1, values.shape[-1])
    mins = w.mins
    if mins is not None and mins.dtype == jnp.int8 and w.coarse_mins is None:  # of the scales
        by_group, mins = by_group + mins.astype(jnp.float32)[:, :, None], None
    scaled = by_group * _fine(w.scales, w.coarse_scales)[:, :, None]
    if mins is not None:
        scaled = scaled + _fine(mins, w.coarse_mins)[:, :, None]
    return scaled.reshape(values.shape)


def _fine(
    factors: Shaped[Array, "P groups lanes"], coarse: Float[Array, "P _ lanes"] | None
) -> Float[Array, "P groups lanes"]:
    if factors.dtype == jnp.uint8:
        return _power_of_two(factors)
    wide = factors.astype(jnp.float32)
    if coarse is None:
        return wide
    each = wide.reshape(wide.shape[0], coarse.shape[1], -1, wide.shape[2])
    return (each * coarse.astype(jnp.float32)[:, :, None]).reshape(wide.shape)


def _power_of_two(e: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return 2^(e - 128)."""
    wide = e.astype(jnp.uint32)
    bits = jnp.where(wide < 2, jnp.uint32(1 << 21) << wide, (wide - 1) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def products(x: Float[Array, "... I"], weights: Sequence[Any]) -> list[Float[Array, "... _"]]:
    """Return x @ weight for each weight, by one call of the native kernel if all are packed in the
    same way."""
    kind = type(weights[0])
    if not issubclass(kind, ProductWeight) or not all(type(weight) is kind for weight in weights):
        return [x @ weight for weight in weights]
    return [product.astype(x.dtype) for product in kind.products(x, tuple(weights))]


def by_kernel(native: Callable[..., Any], by_xla: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that is `native` on a CPU with native kernels, and `by_xla` elsewhere. It
    has no gradient."""

    @jax.custom_jvp
    def product(*arguments: Any) -> Any:
        if unavailable() is not None:
            return by_xla(*arguments)
        return lax.platform_dependent(*arguments, cpu=native, default=by_xla)

    @product.defjvp
    def refused(*_: Any) -> Any:
        raise NotImplementedError(
            "packed weights have no gradient: load the model with weights='dense'"
        )

    return product


def native_products(
    x: Float[Array, "T I"],
    weights: Sequence[PackedMatrix],
    chosen: Int[Array, "T"] | None = None,
    experts: int = 1,
) -> list[Array]:
    """Return x w for each w, or for the expert that each row chooses, of those beside each other in
    w."""
    arrays = [(w.codes, w.scales, w.coarse_scales, w.mins, w.coarse_mins) for w in weights]
    return packed_products(
        x,
        arrays,
        outputs=[w.outputs // experts for w in weights],
        centres=[w.centre for w in weights],
        levels=[w.levels for w in weights],
        digits=1 if weights[0].activations == "int8" else 3,
        chosen=chosen,
        experts=experts,
    )


def _in_tiles(x: Float[Array, "T I"], weights: tuple[PackedMatrix, ...]) -> list[Array]:
    return [by_tiles(rounded(x, w), w) for w in weights]


_of_rows = by_kernel(native_products, _in_tiles)


def rounded(x: Float[Array, "T I"], w: PackedMatrix) -> Float[Array, "T I"]:
    """Return x as products with w take it: rounded to q / 127 times the largest entry of its group,
    with |q| <= 127, if the activations are int8."""
    if w.activations == "float32" or w.scales is None or not w.integers:
        return x
    by_group = x.reshape(len(x), w.scales.shape[1], -1)
    maximum = jnp.max(jnp.abs(by_group), axis=-1, keepdims=True)
    scale = jnp.where(maximum > 1e-30, maximum / 127, 0)
    factor = jnp.where(maximum > 1e-30, 127 / maximum, 0)
    return (jnp.round(by_group * factor) * scale).reshape(x.shape)


def by_tiles(x: Float[Array, "T I"], w: PackedMatrix) -> Float[Array, "T O"]:
    """Multiply by some panels at a time, so that the dequantized matrix never exists as a whole."""
    panels = w.codes.shape[0]
    tiles = next(n for n in range(-(-panels * PANEL // TILE), panels + 1) if panels % n == 0)

    def by_tile(tile: PackedMatrix) -> Float[Array, "T outputs"]:
        return jnp.einsum("ti,pio->tpo", x, _values(tile)).reshape(len(x), -1)

    if tiles == 1:
        return by_tile(w)[:, : w.outputs]
    split = jax.tree.map(lambda array: array.reshape(tiles, -1, *array.shape[1:]), w)
    products = jnp.swapaxes(lax.map(by_tile, split), 0, 1)  # [T, tiles, outputs of a tile]
    return products.reshape(len(x), -1)[:, : w.outputs]
