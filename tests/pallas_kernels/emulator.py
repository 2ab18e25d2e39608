"""Execute the kernels' inline assembly in NumPy, one PTX instruction after another, on the contents
of a GPU's registers.

Integer instructions follow the PTX manual, bit for bit. Pairs of fp16 are computed in float64 and
rounded once, to even. That is exact: 53 bits hold every product of two fp16 numbers, and enough of
its sum with a third for the rounding.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.launch import Launch

U = np.uint32
LANE = 21  # no result may depend on it


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Execute prmt.b32: each of the four low nibbles of the selector chooses a byte of b:a. Its top
    bit repeats that byte's top bit instead.
    """
    a, b, selector = np.broadcast_arrays(a, b, selector)
    source, chosen = (
        np.stack([(r >> U(8 * i)) & U(255) for r in (a, b) for i in range(4)]),
        np.zeros_like(a),
    )
    for i in range(4):
        nibble = selector >> U(4 * i) & U(15)
        byte = np.take_along_axis(source, (nibble & U(7)).astype(np.int64)[None], axis=0)[0]
        chosen |= np.where(nibble & U(8), (byte >> U(7)) * U(255), byte) << U(8 * i)
    return chosen


def logical(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Execute lop3.b32: look bit (a, b, c) up in the table for each bit."""
    terms = []
    for i in range(8):
        if int(table) >> i & 1:
            terms.append((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return functools.reduce(np.bitwise_or, terms)


def on_halves(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return an instruction on two fp16 numbers in each register."""

    def instruction(*registers: np.ndarray) -> np.ndarray:
        halves = [
            np.ascontiguousarray(r).view(np.float16).astype(np.float64)
            for r in np.broadcast_arrays(*map(np.atleast_1d, registers))
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            return operation(*halves).astype(np.float16).view(U)

    return instruction


def on_floats(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return an instruction on fp32 numbers. It computes in float64, and so rounds closer than some
    instructions.
    """

    def instruction(*registers: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return (
                operation(*(r.view(np.float32).astype(np.float64) for r in registers))
                .astype(np.float32)
                .view(U)
            )

    return instruction


def _half_bits(register: np.ndarray) -> np.ndarray:
    return register.view(np.float32).astype(np.float16).view(np.uint16).astype(U)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": np.add,
    "shr.u32": np.right_shift,
    "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "prmt.b32": permuted,
    "lop3.b32": logical,
    "add.rn.f16x2": on_halves(np.add),
    "mul.rn.f16x2": on_halves(np.multiply),
    "neg.f16x2": on_halves(np.negative),
    "fma.rn.f16x2": on_halves(lambda a, b, c: a * b + c),
    "sub.rn.f32": on_floats(np.subtract),
    "fma.rn.f32": on_floats(lambda a, b, c: a * b + c),
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32).view(U),
    "cvt.rn.f16x2.f32": lambda a, b: _half_bits(a) << U(16) | _half_bits(b),
    "ex2.approx.ftz.f32": on_floats(np.exp2),
    "cos.approx.ftz.f32": on_floats(np.cos),
    "sin.approx.ftz.f32": on_floats(np.sin),
}


def computed(assembly: str, pack: int, result: jax.ShapeDtypeStruct, *args: Any) -> np.ndarray:
    """Return the contents of $0 after the assembly.

    Elements of 16 bits share a register in pairs. Elements of 32 bits have one each, so the first
    and the second of a pack of two are separate operands.
    """
    operands = [np.ascontiguousarray(a).view(U) for a in args]
    if pack == 2:
        sizes = [np.dtype(a.dtype).itemsize for a in args]
        operands = [
            x
            for size, o in zip(sizes, operands, strict=True)
            for x in ([o] if size == 2 else [o[..., ::2], o[..., 1::2]])
        ]
    [into] = after(assembly, 1, operands)
    return np.ascontiguousarray(into).view(result.dtype).reshape(result.shape)


def after(assembly: str, results: int, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the contents of the first registers, which are the results, after the assembly. The
    operands are in the next ones.
    """
    registers: dict[str, Any] = {"%laneid": U(LANE)}
    registers |= {f"${i}": operand for i, operand in enumerate(operands, results)}

    def value(source: str) -> Any:
        if source in registers:
            return registers[source]
        return U(int(source[2:], 16)) if source.startswith("0f") else U(int(source, 0))

    for statement in assembly.strip().removeprefix("{").removesuffix("}").split(";"):
        name, space, parameters = statement.strip().partition(" ")
        if halves := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)", statement.strip()):
            low, high, source = halves.groups()
            registers |= {low: value(source) & U(0xFFFF), high: value(source) >> U(16)}
        elif name in INSTRUCTIONS:
            into, *sources = re.split(r",\s*", parameters)
            registers[into] = np.asarray(INSTRUCTIONS[name](*map(value, sources)), U)
        else:
            assert name in ("", ".reg"), f"an instruction without a meaning here: {statement}"
    return [registers[f"${i}"] for i in range(results)]


def asm_on_arrays(assembly: str, *operands: Any, results: int = 1) -> Any:
    """Replace `pallas_kernels.mosaic.registers.asm`, on arrays in place of values."""
    contents = after(assembly, results, [np.asarray(operand) for operand in operands])
    return contents[0] if results == 1 else contents


def execute(
    assembly: str, *, args: Any, pack: int, result_shape_dtypes: Any, **_: Any
) -> list[jax.Array]:
    """Replace `plt.elementwise_inline_asm`, also in interpreted kernels."""
    [result] = result_shape_dtypes
    function = functools.partial(computed, assembly, pack, result)
    if any(isinstance(a, Tracer) for a in args):
        return [jax.pure_callback(function, result, *args)]
    return [jnp.asarray(function(*args))]


@dataclasses.dataclass(frozen=True)
class Emulated(Launch):
    """Interpret kernels in assembly. `execute` must replace the instruction that Triton would
    compile (fixture `assembler`).
    """

    interpret: bool = True

    @property
    def asm(self) -> bool:
        return True
