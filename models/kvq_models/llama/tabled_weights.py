"""Weights of 4 bits whose outputs have 16 levels of their own, and sparse entries that stay as they
are: KVQuant's dense-and-sparse weights (calibration/weights.py) in their bits.

Source: Kim et al., SqueezeLLM, sections 4.1 and 4.2; KVQuant, section 4.4 and Table 5.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped, UInt8, UInt16, UInt32

from cpu_kernels.tabled_product import tabled_products
from kvq_jax.types.pytree import pytree
from kvq_models.llama import huge_pages
from kvq_models.llama.packed_weights import TILE, Activations, ProductWeight, by_kernel
from kvq_models.llama.quantized.dense_and_sparse import WORD, TabledRows, is_finite

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)[None, None, :]


@pytree
@dataclasses.dataclass(frozen=True)
class TabledMatrix(ProductWeight):
    """A matrix [I, O] of 4-bit codes, a table for each output, and sparse entries in their place:

        w[i, o] = sparse_values[e] if entry e is (o, i), or levels[o, code[o, i]]

        codes          uint32 [O, I / 8]: bits 4 j of word w are those of input 8 w + j. The code of
                       a sparse entry is 0
        levels         float16, bfloat16 or float32 [O, 16]
        sparse_starts  int32 [O + 1]: output o has the entries from starts[o] to starts[o + 1]
        sparse_inputs  uint16 [n], rising within an output
        sparse_values  [n], as levels
        value_dtype    of `dequantized`

    x @ w is a native kernel on a CPU. Elsewhere XLA dequantizes tiles. Products are as exact as
    sums of fp32 numbers. There is no gradient.
    """

    codes: UInt32[Array, "O words"]
    levels: Float[Array, "O 16"]
    sparse_starts: Int32[Array, "starts"]
    sparse_inputs: UInt16[Array, "n"]
    sparse_values: Float[Array, "n"]
    value_dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    bits: ClassVar[int] = 4
    integers: ClassVar[bool] = False
    activations: ClassVar[Activations] = "float32"  # which are never rounded

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # counted from the arrays
        return self.codes.shape[1] * WORD, self.codes.shape[0]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Return the arrays, in the order of `tabled_products` and of TabledRows."""
        entries = self.sparse_starts, self.sparse_inputs, self.sparse_values
        return self.codes, self.levels, *entries

    @staticmethod
    def of_rows(x: Float[Array, "T I"], weights: tuple[Any, ...]) -> list[Float[Array, "T _"]]:
        return _of_rows(x, weights)

    def dequantized(self) -> Float[Array, "I O"]:
        return _values(self, 0, self.shape[1]).T.astype(self.dtype)

    def columns(self, outputs: Int[Array, "n"]) -> Float[Array, "n I"]:
        """Return columns of w. Outputs must be in range."""
        return lax.map(lambda output: _values(self, output, 1)[0], outputs).astype(self.dtype)

    def astype(self, dtype: DTypeLike) -> TabledMatrix:
        """Return the matrix with its levels and sparse values in another dtype."""
        return dataclasses.replace(
            self,
            levels=self.levels.astype(dtype),
            sparse_values=self.sparse_values.astype(dtype),
            value_dtype=jnp.dtype(dtype).name,
        )


def _values(w: TabledMatrix, first: Any, count: int) -> Float[Array, "count I"]:
    """Return the values of `count` outputs from `first` on, fp32."""
    words, levels = (lax.dynamic_slice_in_dim(array, first, count) for array in (w.codes, w.levels))
    codes = ((words[:, :, None] >> jnp.asarray(_SHIFTS)) & 15).reshape(count, -1)
    values = jnp.take_along_axis(levels.astype(jnp.float32), codes.astype(jnp.int32), axis=1)
    entries = jnp.arange(len(w.sparse_inputs))
    outputs = jnp.searchsorted(w.sparse_starts, entries, side="right") - 1 - first
    outputs = jnp.where(outputs < 0, count, outputs)  # outside this tile: dropped
    at = outputs, w.sparse_inputs.astype(jnp.int32)
    return values.at[at].set(w.sparse_values.astype(jnp.float32), mode="drop")


def _native(x: Float[Array, "T I"], weights: tuple[TabledMatrix, ...]) -> list[Array]:
    return tabled_products(x, [w.arrays for w in weights])


def _in_tiles(x: Float[Array, "T I"], weights: tuple[TabledMatrix, ...]) -> list[Array]:
    return [_by_tiles(x, w) for w in weights]


_of_rows = by_kernel(_native, _in_tiles)


def _by_tiles(x: Float[Array, "T I"], w: TabledMatrix) -> Float[Array, "T O"]:
    """Multiply by some outputs at a time: the dequantized matrix never exists as a whole."""
    outputs = w.shape[1]
    count = next(n for n in range(-(-outputs // TILE), outputs + 1) if outputs % n == 0)
    size = outputs // count
    by_tile = lax.map(lambda i: x @ _values(w, i * size, size).T, jnp.arange(count))
    return jnp.swapaxes(by_tile, 0, 1).reshape(len(x), outputs)


def matrix_of_rows(rows: TabledRows, dtype: DTypeLike) -> tuple[TabledMatrix, bool]:
    """Return the matrix [in, out] of a checkpoint's tensors, on the default device (a CPU's in huge
    pages) and with values of a dtype, and True if all of it is finite."""
    arrays = (rows.codes.view("<u4"), *rows[1:])
    matrix = TabledMatrix(*map(_placed, arrays), value_dtype=jnp.dtype(dtype).name)
    return matrix, is_finite(rows)


def rows_of_matrix(matrix: TabledMatrix) -> TabledRows:
    """Return the tensors that a checkpoint has for a matrix."""
    codes, *others = (np.asarray(array) for array in matrix.arrays)
    return TabledRows(codes.astype("<u4", copy=False).view(np.uint8), *others)


def packed_rows(
    weights: Float[np.ndarray, "O I"],
    codes: UInt8[np.ndarray, "O I"],
    levels: Float[np.ndarray, "O 16"],
    kept: Bool[np.ndarray, "O I"],
) -> TabledMatrix:
    """Return the matrix [I, O] of codes, and of the weights that are `kept`, in their dtype. I is a
    multiple of 8 and at most 65,536."""
    outputs, inputs = np.nonzero(kept)
    codes = np.where(kept, np.uint8(0), codes)
    starts = np.searchsorted(outputs, np.arange(len(weights) + 1)).astype(np.int32)
    pairs = codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))
    entries = starts, inputs.astype(np.uint16), weights[outputs, inputs]
    return matrix_of_rows(TabledRows(pairs, levels, *entries), weights.dtype)[0]


def _placed(array: Shaped[np.ndarray, "..."]) -> Array:
    room = huge_pages.empty(array.shape, array.dtype)
    room[...] = array
    return huge_pages.placed(room)
