"""Words of runs of channels as matrices in registers, and the codes in them.

A stripe is 256 tokens. Of every span of 32, warp p reads the tokens 2 p and 2 p + 1 of each eight.
A *slot* i is 16 of its tokens, rows 2 s + r of a product:

    token = 32 s + 8 i + 2 p + r        s = 0 .. 7,    r = 0, 1,    i = 0 .. 3

So whatever the number of tokens that share a row of words, a warp's words hold slot i in the i-th
fourth of their bits, a distance from there that only depends on the warp (tiles/layout.py; codes of
8 bits in the halves of two words). So no warp unpacks what belongs to another.

Like the operations of matrices.py these have two forms: instructions on registers, and array
operations, which the interpreter runs.
"""

# pyright: reportArgumentType=false
# the stubs of MLIR do not say how many results inline assembly has

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.registers import (
    LANES,
    ROWS,
    SIDE,
    WARPS,
    asm,
    fragment,
    grid,
    lane,
    ldmatrix_at,
    warp,
)
from pallas_kernels.readers.runs import PER_OCTAVE
from pallas_kernels.tiles.layout import SPAN, WORD_BITS, PlaneLayout

SLOTS = 4  # of a warp
TOKENS = SLOTS * ROWS  # of a warp
STRIPE = WARPS * TOKENS


@dataclasses.dataclass(frozen=True)
class PlaneSet:
    """The words of `bits` bits of the codes of a run, [rows, tiles, channels] of a stripe
    of tokens."""

    layout: PlaneLayout
    bits: int

    @property
    def rows(self) -> int:
        """Return the rows of words of a span."""
        return SPAN // self.layout.slots

    @property
    def tiles(self) -> int:
        return self.layout.slots * self.bits // WORD_BITS

    @property
    def loads(self) -> int:
        """Return how many words of a channel hold a token's four slots."""
        return max(1, self.bits // 4)

    def shift(self, number: Any, divide: Any) -> Any:
        """Return the bits below the first slot's, in the words of a warp."""
        return self.bits * divide(divide(number, self.rows // 2 or 1), self.tiles)


def _places(plane: PlaneSet) -> tuple[jax.Array, jax.Array]:
    """Return the rows and the tiles of the words of warps, [WARPS, loads * ROWS]."""
    number, row = (lax.broadcasted_iota(jnp.int32, (WARPS, plane.loads * ROWS), i) for i in (0, 1))
    pairs, token = plane.rows // 2, row % ROWS
    of_tokens = plane.rows * (token // 2) + token % 2
    of_loads = 2 * WARPS * (row // ROWS)
    return 2 * (number % pairs) + of_loads + of_tokens, number // pairs % plane.tiles


def token_of(place: Any, number: Any) -> Any:
    """Return the tokens of a warp's rows, from the stripe's first."""
    slot, row = lax.div(place, jnp.int32(ROWS)), lax.rem(place, jnp.int32(ROWS))
    two = jnp.int32(2)
    return SPAN * lax.div(row, two) + 2 * WARPS * slot + 2 * number + lax.rem(row, two)


def load_words(ref: Any, plane: PlaneSet, transposed: bool, interpret: bool) -> jax.Array:
    """Load a warp's words [WARPS, loads * ROWS, channels] from `ref` [rows, tiles, channels] in
    shared memory, or the transpose of each warp's."""
    rows, channels = plane.loads * ROWS, ref.shape[2]
    shape = (WARPS, channels, rows) if transposed else (WARPS, rows, channels)
    if interpret:
        words = ref[...][_places(plane)]
        return jnp.swapaxes(words, 1, 2) if transposed else words
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int16, layout=LANES),
    )

    @inline
    def words(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)

        def c(value: int) -> ir.Value:
            return utils.c(value, i32)

        (row, tile, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        pairs, number = plane.rows // 2, warp()
        token = arith.remui(lane(), c(SIDE))
        first = arith.muli(arith.divui(token, c(2)), c(plane.rows * row))
        first = arith.addi(first, arith.muli(arith.remui(token, c(2)), c(row)))
        first = arith.addi(first, arith.muli(arith.remui(number, c(pairs)), c(2 * row)))
        of_tile = arith.remui(arith.divui(number, c(pairs)), c(plane.tiles))
        first = arith.addi(first, arith.muli(of_tile, c(tile)))
        half = plane.rows * row * SIDE // 2  # eight tokens are four spans
        starts = [
            2 * WARPS * row * load + half * i + SIDE * j
            for load in range(plane.loads)
            for i in range(2)
            for j in range(channels // SIDE)
        ]
        registers = ldmatrix_at(ref, first, starts, transposed).reshape(-1, channels // SIDE)
        dtype = ir.IntegerType.get_signless(16)
        return fragment(registers.T if transposed else registers, shape, dtype)

    return words(ref)


def beside(parts: Sequence[jax.Array], axis: int, interpret: bool) -> jax.Array:
    """Return arrays of whole matrices side by side."""
    if len(parts) == 1:
        return parts[0]
    if interpret:
        return jnp.concatenate(parts, axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,) * len(parts),
        return_type=plgpu.ShapeDtypeStruct(tuple(shape), parts[0].dtype, layout=LANES),
    )

    @inline
    def joined(ctx: Any, *parts: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.concatenate([grid(part) for part in parts], axis - 1)
        return fragment(registers, tuple(shape), parts[0].mlir_dtype)

    return joined(*parts)


def load_table(ref: Any, interpret: bool) -> jax.Array:
    """Load fp16 [WARPS, rows, columns], the same for every warp, from [columns / SIDE, rows, SIDE]
    in shared memory, into the registers of a product's first operand."""
    matrices, rows, _ = ref.shape
    shape = (WARPS, rows, matrices * SIDE)
    if interpret:
        return jnp.broadcast_to(jnp.swapaxes(ref[...], 0, 1).reshape(shape[1:]), shape)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=LANES),
    )

    @inline
    def table(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        first = arith.muli(arith.remui(lane(), utils.c(SIDE, i32)), utils.c(SIDE, i32))
        starts = [SIDE * SIDE * i for i in range(matrices * rows // SIDE)]
        registers = ldmatrix_at(ref, first, starts, False).reshape(matrices, -1)
        return fragment(registers.T, shape, ir.F16Type.get())

    return table(ref)


def swapped(x: jax.Array, interpret: bool) -> jax.Array:
    """Return fp16 numbers with the two of each pair of columns exchanged."""
    if interpret:
        return jnp.flip(x.reshape(*x.shape[:2], -1, 2), 3).reshape(x.shape)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LANES)
    )

    @inline
    def exchanged(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty(x.registers.shape, dtype=object)
        for place, register in np.ndenumerate(x.registers):
            both = asm("prmt.b32 $0, $1, 0, 0x1032;", utils.bitcast(register, i32))
            registers[place] = utils.bitcast(both, register.type)
        return fragment(registers, x.shape, x.mlir_dtype)

    return exchanged(x)


def turned(q: jax.Array, partner: jax.Array, cos: Any, sin: Any, interpret: bool) -> jax.Array:
    """Return q cos + partner sin in fp16, fused."""
    if interpret:
        return q * cos + partner * sin
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,) * 4, return_type=plgpu.ShapeDtypeStruct(q.shape, q.dtype, layout=LANES)
    )

    @inline
    def sums(ctx: Any, *arrays: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        q = arrays[0]
        registers = np.empty(q.registers.shape, dtype=object)
        for place, register in np.ndenumerate(q.registers):
            operands = [utils.bitcast(array.registers[place], i32) for array in arrays]
            form = "{ .reg .b32 t; mul.rn.f16x2 t, $2, $4; fma.rn.f16x2 $0, $1, $3, t; }"
            registers[place] = utils.bitcast(asm(form, *operands), register.type)
        return fragment(registers, q.shape, q.mlir_dtype)

    return sums(q, partner, cos, sin)


def apart(x: jax.Array, interpret: bool) -> jax.Array:
    """Return x, and let no load move across this place: compilers would begin with the loads of
    all chunks, and spill what they bring."""
    if interpret:
        return x
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LANES)
    )

    @inline
    def same(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        llvm.inline_asm(None, [], "bar.warp.sync 0xffffffff;", "~{memory}", has_side_effects=True)
        return x

    return same(x)


def load_factors(ref: Any, columns: int, interpret: bool) -> jax.Array:
    """Return 2^(scale / 8) of a warp's tokens, fp32 [WARPS, TOKENS, columns] with equal columns,
    from the scales of a stripe, int8 [spans, SPAN]."""
    shape = (WARPS, TOKENS, columns)
    if interpret:
        number, place = (lax.broadcasted_iota(jnp.int32, shape[:2], i) for i in (0, 1))
        factors = jnp.exp2(
            ref[...].reshape(-1)[token_of(place, number)].astype(jnp.float32) * (1 / PER_OCTAVE)
        )
        return jnp.broadcast_to(factors[:, :, None], shape)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=LANES),
    )

    @inline
    def factors(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        byte = ir.IntegerType.get_signless(8)

        def c(value: int) -> ir.Value:
            return utils.c(value, i32)

        row = arith.divui(lane(), c(4))
        first = arith.addi(arith.muli(arith.divui(row, c(2)), c(SPAN)), arith.remui(row, c(2)))
        first = arith.addi(first, arith.muli(warp(), c(2)))
        base = utils.getelementptr(utils.memref_ptr(ref), [first], byte)
        registers = np.empty((TOKENS // SIDE, columns // SIDE), dtype=object)
        for i in range(len(registers)):
            slot, half = divmod(i, 2)
            at = utils.getelementptr(base, [2 * WARPS * slot + SPAN * SIDE // 2 * half], byte)
            scale = arith.sitofp(f32, arith.extsi(i32, llvm.load(byte, at)))
            eighths = arith.mulf(scale, utils.c(1 / PER_OCTAVE, f32))
            factor = llvm.inline_asm(f32, [eighths], "ex2.approx.ftz.f32 $0, $1;", "=f,f")
            registers[i, :] = vector.broadcast(ir.VectorType.get((2,), f32), factor)
        return fragment(registers, shape, f32)

    return factors(ref)
