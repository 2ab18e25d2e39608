"""Tiles of 16-bit numbers as the two halves of registers, for array operations.

A register holds two fp16 numbers, and tensor cores want neighbours along the contracted axis in it.
Array operations only know tiles of single numbers. Compilers process 16-bit ones one at a time and
pack them again. So tiles are computed on as `Halves`: the first of each two neighbours, and the
second. Splitting and joining cost no machine code, because the halves are the register itself, and
two operations on halves become one on a pair (docs/kernels.md has the counts).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float16, Num, UInt32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=["axis"]
)
@dataclasses.dataclass(frozen=True)
class Halves:
    """A tile cut in two: the first of each two neighbours along `axis`, and the second."""

    first: Num[Array, "a b"]
    second: Num[Array, "a b"]
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole tile."""
        rows, columns = self.first.shape
        return (2 * rows, columns) if self.axis == 0 else (rows, 2 * columns)

    @classmethod
    def of(cls, tile: Num[Array, "rows W"], axis: int) -> Halves:
        """Cut a tile in two along `axis`."""
        rows, columns = tile.shape
        paired = (
            tile.reshape(rows // 2, 2, columns).swapaxes(1, 2)
            if axis == 0
            else tile.reshape(rows, columns // 2, 2)
        )
        first, second = (half.reshape(half.shape[:2]) for half in lax.split(paired, (1, 1), axis=2))
        return cls(first, second, axis)

    def joined(self) -> Num[Array, "rows W"]:
        """Put the tile together again."""
        paired = lax.concatenate([self.first[:, :, None], self.second[:, :, None]], 2)
        return (paired.swapaxes(1, 2) if self.axis == 0 else paired).reshape(self.shape)


Half = Float16[Array, "rows W"] | Halves


def joined(tile: Half) -> Float16[Array, "rows W"]:
    """Return the whole tile, as a dot needs it."""
    return tile.joined() if isinstance(tile, Halves) else tile


def by_halves(operation: Callable[..., Any], *operands: Array | Halves) -> Any:
    """Apply an elementwise operation that returns one or several arrays. It is applied to halves if
    an operand is `Halves`.
    """
    axes = {operand.axis for operand in operands if isinstance(operand, Halves)}
    if not axes:
        return operation(*operands)
    [axis] = axes
    halves = [
        operand if isinstance(operand, Halves) else Halves.of(operand, axis) for operand in operands
    ]
    # The second half first: ptxas makes pairs in this order. In the other it would exchange the
    # halves of every register before and after.
    second = operation(*(half.second for half in halves))
    return jax.tree.map(
        lambda a, b: Halves(a, b, axis), operation(*(half.first for half in halves)), second
    )


def in_pairs(tile: Num[Array, "rows W"], axis: int) -> UInt32[Array, "a b"]:
    """Put two neighbouring 16-bit numbers into one of 32 bits, the first one in the low half."""
    halves = Halves.of(tile, axis)
    first, second = (
        lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32)
        for half in (halves.first, halves.second)
    )
    return first | second << np.uint32(16)


def out_of_pairs(pairs: UInt32[Array, "a b"], axis: int) -> Halves:
    """Return the fp16 numbers with these bits, as halves of a tile."""
    low, high = (
        lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)
        for half in (pairs, pairs >> np.uint32(16))
    )
    return Halves(low, high, axis)
