"""Arithmetic on tiles of fp16 and fp32 numbers: inline assembly on pairs of fp16 (`half2`), or
array operations on `Halves`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float16

from pallas_kernels.tiles.halves import Half, by_halves
from pallas_kernels.triton_call import plt


def subtract_scale(h: Half, constant: int | float, scale: Array, asm: bool) -> Half:
    """Return (h - constant) * scale. The subtraction is exact for codes and their biases. constant
    must be an fp16 number.
    """
    if asm:
        return half2(
            f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 t, $1, t;"
            " mul.rn.f16x2 $0, t, $2; }",
            h,
            scale,
        )
    return by_halves(lambda h, scale: (h - np.float16(constant)) * scale, h, scale)


def subtract_scale_add(
    h: Half, constant: int | float, scale: Array, zero: Array, asm: bool
) -> Half:
    """Return (h - constant) * scale + zero, rounded once in asm and twice in jnp."""
    if asm:
        return half2(
            f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 t, $1, t;"
            " fma.rn.f16x2 $0, t, $2, $3; }",
            h,
            scale,
            zero,
        )
    return by_halves(
        lambda h, scale, zero: (h - np.float16(constant)) * scale + zero, h, scale, zero
    )


def subtract_constant(h: Half, constant: int | float, asm: bool) -> Half:
    """Return h - constant, exact for codes and their biases. constant must be an fp16 number."""
    if asm:
        return half2(
            f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 $0, $1, t; }}", h
        )
    return by_halves(lambda h: h - np.float16(constant), h)


def half_add(a: Half, b: Array, asm: bool) -> Half:
    """Return a + b in fp16."""
    return half2("add.rn.f16x2 $0, $1, $2;", a, b) if asm else by_halves(lambda a, b: a + b, a, b)


def half_multiply(a: Half, b: Array, asm: bool) -> Half:
    """Return a * b in fp16."""
    return half2("mul.rn.f16x2 $0, $1, $2;", a, b) if asm else by_halves(lambda a, b: a * b, a, b)


def half_multiply_add(a: Half, b: Array, c: Array, asm: bool) -> Half:
    """Return a * b + c in fp16, rounded once in asm and twice in jnp."""
    if asm:
        return half2("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c)
    return by_halves(lambda a, b, c: a * b + c, a, b, c)


def half2(assembly: str, *operands: Any) -> Float16[Array, "rows W"]:
    """Run inline assembly on pairs. Each 32-bit operand $1, $2, ... holds two neighbouring 16-bit
    elements, and $0 the two fp16 results.
    """
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
    """Write a 16-bit constant for both halves of a register, in assembly."""
    return f"{constant << 16 | constant:#x}"


def half_twice(value: int | float) -> str:
    """Write an fp16 number for both halves of a register. Raises ValueError if it is not one."""
    half = np.float16(value)
    if float(half) != value:
        raise ValueError(f"{value=} is not an fp16 number")
    return twice(int(half.view(np.uint16)))


def multiply_add(a: Array, b: Array, c: Array, asm: bool) -> Array:
    """Return a * b + c in fp32, in asm by one instruction. XLA's Triton pipeline writes two, and
    ptxas does not fuse them.
    """
    if not asm:
        return a * b + c
    return _float("fma.rn.f32 $0, $1, $2, $3;", *jnp.broadcast_arrays(a, b, c))


def exp2(x: Array, asm: bool) -> Array:
    """Return 2^x in fp32, in asm without the guard for subnormal results, which become 0."""
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
