"""What kernels compute on tiles of fp16 and fp32 numbers: in inline assembly, or in array operations.

A register holds two fp16 numbers, and the tensor cores want neighbours along the contracted axis in it. Assembly computes on such pairs
(`half2`). Array operations know tiles of single numbers only; compilers take those of 16 bits one at a time and pack them again. So there a
tile is computed on as `Halves`: the first of each two neighbours, and the second. Splitting and joining are the register itself, nothing is
left of them in machine code, and two operations on halves become one on a pair (docs/kernels.md has the counts).
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
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float16, Num, UInt32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=["axis"])
@dataclasses.dataclass(frozen=True)
class Halves:
    """A tile cut in two: of each two neighbours along `axis`, the first and the second."""

    first: Num[Array, "a b"]
    second: Num[Array, "a b"]
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tile."""
        rows, columns = self.first.shape
        return (2 * rows, columns) if self.axis == 0 else (rows, 2 * columns)

    @classmethod
    def of(cls, tile: Num[Array, "rows W"], axis: int) -> Halves:
        rows, columns = tile.shape
        paired = tile.reshape(rows // 2, 2, columns).swapaxes(1, 2) if axis == 0 else tile.reshape(rows, columns // 2, 2)
        first, second = (half.reshape(half.shape[:2]) for half in lax.split(paired, (1, 1), axis=2))
        return cls(first, second, axis)

    def joined(self) -> Num[Array, "rows W"]:
        paired = lax.concatenate([self.first[:, :, None], self.second[:, :, None]], 2)
        return (paired.swapaxes(1, 2) if self.axis == 0 else paired).reshape(self.shape)


Half = Float16[Array, "rows W"] | Halves


def joined(tile: Half) -> Float16[Array, "rows W"]:
    return tile.joined() if isinstance(tile, Halves) else tile


def by_halves(operation: Callable[..., Any], *operands: Array | Halves) -> Any:
    """operation(*operands), elementwise: an array or several. In halves if an operand is."""
    axes = {operand.axis for operand in operands if isinstance(operand, Halves)}
    if not axes:
        return operation(*operands)
    [axis] = axes
    halves = [operand if isinstance(operand, Halves) else Halves.of(operand, axis) for operand in operands]
    # The second half first: ptxas makes pairs in this order, and would otherwise exchange the halves of every register before and after.
    second = operation(*(half.second for half in halves))
    return jax.tree.map(lambda a, b: Halves(a, b, axis), operation(*(half.first for half in halves)), second)


def in_pairs(tile: Num[Array, "rows W"], axis: int) -> UInt32[Array, "a b"]:
    """Two neighbouring 16-bit numbers in one of 32 bits, the first one low."""
    halves = Halves.of(tile, axis)
    first, second = (lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in (halves.first, halves.second))
    return first | second << np.uint32(16)


def out_of_pairs(pairs: UInt32[Array, "a b"], axis: int) -> Halves:
    """The fp16 numbers whose bits these are."""
    low, high = (lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16) for half in (pairs, pairs >> np.uint32(16)))
    return Halves(low, high, axis)


def subtract_scale(h: Half, constant: int | float, scale: Array, asm: bool) -> Half:
    """(h - constant) * scale. The subtraction is exact for codes and their biases; constant must be an fp16 number."""
    if asm:
        return half2(f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 t, $1, t; mul.rn.f16x2 $0, t, $2; }}", h, scale)
    return by_halves(lambda h, scale: (h - np.float16(constant)) * scale, h, scale)


def subtract_scale_add(h: Half, constant: int | float, scale: Array, zero: Array, asm: bool) -> Half:
    """(h - constant) * scale + zero, rounded once in asm and twice in jnp."""
    if asm:
        return half2(
            f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 t, $1, t; fma.rn.f16x2 $0, t, $2, $3; }}", h, scale, zero
        )
    return by_halves(lambda h, scale, zero: (h - np.float16(constant)) * scale + zero, h, scale, zero)


def half_multiply_add(a: Half, b: Array, c: Array, asm: bool) -> Half:
    """a * b + c in fp16, rounded once in asm and twice in jnp."""
    return half2("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c) if asm else by_halves(lambda a, b, c: a * b + c, a, b, c)


def half2(assembly: str, *operands: Any) -> Float16[Array, "rows W"]:
    """Inline assembly on pairs: each 32-bit operand $1, $2, ... holds two neighbouring 16-bit elements, $0 the two fp16 results."""
    shape = operands[0].shape
    [result] = plt.elementwise_inline_asm(
        assembly,
        args=[jnp.broadcast_to(operand, shape) for operand in operands],
        constraints=",".join(["=r"] + ["r"] * len(operands)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float16)],
    )
    return result


def twice(constant: int) -> str:
    """A 16-bit constant for both halves of a register, as assembly writes it."""
    return f"{constant << 16 | constant:#x}"


def half_twice(value: int | float) -> str:
    half = np.float16(value)
    if float(half) != value:
        raise ValueError(f"{value=} is not an fp16 number")
    return twice(int(half.view(np.uint16)))


def multiply_add(a: Array, b: Array, c: Array, asm: bool) -> Array:
    """a * b + c in fp32, as one instruction: XLA's Triton pipeline writes a multiplication and an addition, which ptxas keeps apart."""
    if not asm:
        return a * b + c
    return _float("fma.rn.f32 $0, $1, $2, $3;", *jnp.broadcast_arrays(a, b, c))


def exp2(x: Array, asm: bool) -> Array:
    """2^x in fp32; in asm without the guard for subnormal results, which are 0 here."""
    return _float("ex2.approx.ftz.f32 $0, $1;", x) if asm else jnp.exp2(x)


def _float(assembly: str, *operands: Array) -> Array:
    [result] = plt.elementwise_inline_asm(
        assembly,
        args=list(operands),
        constraints=",".join(["=f"] + ["f"] * len(operands)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)],
    )
    return result
