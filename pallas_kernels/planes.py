"""Packed words in channel planes, as kernels read them: which bits of which tile hold a code, and how it becomes an fp16 number.

The layout is that of `kvq_jax.packing` (its facts are passed in as a `Planes`). A row of words is m tiles of W words; bit field i of tile j
holds the W channels of slot-and-chunk number i * m + j (number = slot * chunks + chunk). A field of the tile, masked and moved, has the
shape of the tile: no reshape, no gather.

From bits to fp16 without a conversion. Under the exponent bits (25 - p) << 10 the mantissa bit p of an fp16 number is worth 1. So a code
at bit p there *is* the number 2^(10 - p) + code:

    fp16bits((w >> shift) & (mask << p) | (25 - p) << 10)  ==  bias + code,    bias = 2^(10 - p)

One shift (often none) and one `lop3` convert a pair of codes. The bias is subtracted exactly later: from a partial dot product, or by an
fp16 addition. p + bits <= 10, so codes of up to 8 bits fit.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float16, Int16

SUPPORTED_BITS = (2, 3, 4, 5, 8)
WORD = 16


@dataclasses.dataclass(frozen=True)
class Field:
    """Where one code lies, and how it becomes fp16: (word[tile] >> shift) & mask at bit `position`, value bias + code.

    A code with a bit in a second plane set (3 = 2 + 1 bits, 5 = 4 + 1) has it in `high_tile`, to be moved right by `high_shift` to stand
    above the low bits. Negative shifts go left.
    """

    tile: int
    shift: int
    position: int
    bits: int
    high_tile: int | None = None
    high_shift: int = 0

    @property
    def bias(self) -> int:
        return 1 << (10 - self.position)

    @property
    def mask(self) -> int:
        """Of the low bits, in place."""
        return ((1 << self.bits) - 1) << self.position

    @property
    def high_mask(self) -> int:
        return 1 << (self.position + self.bits)

    @property
    def exponent(self) -> int:
        return (25 - self.position) << 10


@dataclasses.dataclass(frozen=True)
class Planes:
    """Facts of a packed side: code bits, H channels = chunks * width, `slots` tokens in a word row. Static and hashable."""

    bits: int
    channels: int
    chunks: int
    width: int
    slots: int

    @property
    def sets(self) -> tuple[int, ...]:
        """Bits of each plane set, the low bits first: powers of two, as `kvq_jax.packing` stores them."""
        return tuple(1 << i for i in reversed(range(4)) if self.bits >> i & 1)

    def tiles(self, set_bits: int) -> int:
        return self.slots * self.chunks * set_bits // WORD

    def field(self, slot: int, chunk: int) -> Field:
        """Where token slot `slot` has its chunk of W channels."""
        return _field(self, slot * self.chunks + chunk)


@functools.cache
def _field(planes: Planes, number: int) -> Field:
    low = planes.sets[0]
    index, tile = divmod(number, planes.tiles(low))
    shift, position = _place(low * index, low, planes.bits)
    if len(planes.sets) == 1:
        return Field(tile, shift, position, low)
    index, high_tile = divmod(number, planes.tiles(1))
    return Field(tile, shift, position, low, high_tile, index - (position + low))


def _place(bit: int, low: int, bits: int) -> tuple[int, int]:
    """(shift, position) for a field at `bit` of its word. Fields share few shifts, so that the compiler shares them too.

    Position 0 means a bias of 1024, which costs a partial dot product three bits more than position 2: used where the field would need
    a shift of its own.
    """
    if low == 8:
        return bit, 0
    last = 10 - bits
    shifts, lowest = ((0, 6, -4), 2) if bits == 2 else ((0, 8, 4), 0)
    for shift in shifts:
        if lowest <= bit - shift <= last:
            return shift, bit - shift
    raise AssertionError(f"a field at {bit=} of {bits=} fits nowhere")


def codes(low: list[Int16[Array, "rows W"]], high: list[Int16[Array, "rows W"]], field: Field, asm: bool) -> Float16[Array, "rows W"]:
    """bias + code of one field, exactly. low, high: the W-wide tiles of a word row's plane sets."""
    top = None if field.high_tile is None else high[field.high_tile]
    return (_asm_codes if asm else _jnp_codes)(low[field.tile], top, field)


def _jnp_codes(words: Array, high: Array | None, field: Field) -> Array:
    bits = (_moved(words, field.shift) & np.int16(field.mask)) | np.int16(field.exponent)
    if high is not None:
        bits = bits | (_moved(high, field.high_shift) & np.int16(field.high_mask))
    return lax.bitcast_convert_type(bits, jnp.float16)


def _moved(words: Array, shift: int) -> Array:
    if shift > 0:
        return lax.shift_right_logical(words, jnp.full((), shift, jnp.int16))
    return lax.shift_left(words, jnp.full((), -shift, jnp.int16)) if shift < 0 else words


def _asm_codes(words: Array, high: Array | None, field: Field) -> Array:
    if field.bits == 8:  # bytes of two words, each below the byte 0x64
        index = field.shift // 8
        selector = 0x4 << 12 | (2 + index) << 8 | 0x4 << 4 | index
        return half2(f"prmt.b32 $0, $1, 0x64646464, {selector:#x};", words)
    into = "$0" if high is None else "t"
    low = f"{_asm_moved('t', '$1', field.shift)} lop3.b32 {into}, t, {twice(field.mask)}, {twice(field.exponent)}, 0xea;"
    if high is None:
        return half2(f"{{ .reg .b32 t; {low} }}", words)
    top = f"{_asm_moved('u', '$2', field.high_shift)} lop3.b32 $0, u, {twice(field.high_mask)}, t, 0xea;"
    return half2(f"{{ .reg .b32 t, u; {low} {top} }}", words, high)


def _asm_moved(into: str, source: str, shift: int) -> str:
    # bits that cross from one half of the register into the other are masked off afterwards
    if shift == 0:
        return f"mov.b32 {into}, {source};"
    return f"{'shr' if shift > 0 else 'shl'}.b32 {into}, {source}, {abs(shift)};"


def twice(constant: int) -> str:
    return f"{constant << 16 | constant:#x}"


def half2(assembly: str, *operands: Array) -> Float16[Array, "rows W"]:
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


def subtract_scale(h: Array, constant: float, scale: Array, asm: bool) -> Float16[Array, "rows W"]:
    """(h - constant) * scale. The subtraction is exact for codes and their biases; constant must be an fp16 number."""
    if asm:
        return half2(f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 t, $1, t; mul.rn.f16x2 $0, t, $2; }}", h, scale)
    return (h - np.float16(constant)) * scale


def subtract_scale_add(h: Array, constant: float, scale: Array, zero: Array, asm: bool) -> Float16[Array, "rows W"]:
    """(h - constant) * scale + zero, rounded once in asm and twice in jnp."""
    if asm:
        return half2(
            f"{{ .reg .b32 t; mov.b32 t, {half_twice(-constant)}; add.rn.f16x2 t, $1, t; fma.rn.f16x2 $0, t, $2, $3; }}", h, scale, zero
        )
    return (h - np.float16(constant)) * scale + zero


def half_multiply_add(a: Array, b: Array, c: Array, asm: bool) -> Float16[Array, "rows W"]:
    """a * b + c in fp16, rounded once in asm and twice in jnp."""
    return half2("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c) if asm else a * b + c


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


def half_twice(value: float) -> str:
    half = np.float16(value)
    if float(half) != value:
        raise ValueError(f"{value=} is not an fp16 number")
    return twice(int(half.view(np.uint16)))
