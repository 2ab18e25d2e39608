"""Keys in polar form, as warps read them: cosines and sines by polynomials of two fp16 numbers at a
time.

    theta = m + x,    x = (code - centre) step,    centre = 2^(angle_bits - 1)
    score = q . r R(m) (cos x, sin x) = (R(-m) q) . r (cos x, sin x)

m belongs to a pair and a group of tokens. A warp turns its queries back by it once for a span, and
lanes share the work for its cosines and sines. So |x| is at most half a turn, and with s = sqrt(2)
sin(x / 2) and c = sqrt(2) cos(x / 2) the key is

    r cos x = r - (r s) s,    r sin x = (r s) c.

All of it is computed for half of the radius, because r s may leave the range of fp16.
That is ten instructions for two pairs, and none for the unit of special functions, which would
take as long as the memory. A biased angle code becomes x by one multiply-add with -(bias + centre)
step, rounded to fp16. Rounding moves all angles of a group by the same, which m takes back in fp32.

If angles are on the whole circle, keys have an error of 1.2e-3 of their length. It is less for
narrower groups. Angles of 4 bits were rounded by up to 0.2.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# the stubs of MLIR do not say how many results inline assembly has, and JAX 0.10, with which types
# are checked, has an older Mosaic GPU

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
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.grouped import GroupedSide
from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.registers import (
    LANES,
    PAIR,
    ROWS,
    SIDE,
    WARPS,
    asm,
    cast,
    fragment,
    grid,
    lane,
    ref_dtype,
    twice,
    warp,
)
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.readers.shared import query_planes
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.tiles.words import Bit, BitRun, code_bits

# sqrt(2) sin(x / 2) / x and sqrt(2) cos(x / 2) for |x| <= pi + 1/8 in powers of x^2, lowest first.
# The fp16 numbers around those of the minimax polynomials that give keys the least error: 0.7e-3 of
# their length (root mean square), and 1.2e-3 with all roundings.
SINE = (0.70654296875, -0.029205322265625, 0.00032711029052734375)
COSINE = (1.4130859375, -0.1749267578125, 0.003215789794921875)
BIAS = 1024  # of an angle code at the lowest bit of an fp16 number
OF_WARP = 64  # pairs, two for each lane


@dataclasses.dataclass(frozen=True)
class PolarKeys(GroupedSide):
    """Scores of a stripe."""

    polar: PolarReader

    @classmethod
    def of(cls, reader: PolarReader, span: int) -> PolarKeys:
        assert span == SPAN, "packed rows come in whole spans"
        return cls(GroupedReader(reader.layout, "tokens", reader.group, None), reader)

    @property
    def chunks(self) -> tuple[int, int]:
        return self.polar.chunks

    def query(self, q: jax.Array, stored: Sequence[jax.Array]) -> jax.Array:
        return query_planes(2 * q, self.chunks[0])  # keys are halved

    def opened(self, planes: Sequence[jax.Array], table: None, ops: Matrices) -> Any:
        return planes

    def buffers(
        self, arrays: Sequence[jax.Array], slots: int, tokens: int, ops: Matrices
    ) -> list[Any]:
        *words, step, minimum = super().buffers(arrays, slots, tokens, ops)
        return [*words, step, minimum, step, minimum]  # of radii, and of angles

    def scores(
        self, query: Any, buffers: Sequence[Any], stripe: Stripe, ops: Matrices
    ) -> jax.Array:
        """Return log2(e) / sqrt(H) * q . k of a stripe's tokens, [WARPS, SPAN, columns]. Scores of
        dead tokens may be anything."""
        polar, pairs = Polar(ops.interpret, self.polar.angle_bits), self.layout.chunks
        columns = query[0].shape[1]
        words = self._words(buffers, stripe, ops)
        *radii, turn, minimum = self._scales(buffers, stripe, lambda ref: ref)
        cos, sin = polar.middles(turn, minimum, columns)
        scales = [ops.load_rows(ref, SIDE) for ref in (*radii, turn)]
        total = splat((WARPS, ROWS, columns), 0.0)
        for c in range(pairs):
            chunk = slice(None), slice(None), self._chunk(c)
            planes = ops.turned(query[c], query[pairs + c], cos[chunk], sin[chunk], back=True)
            keys = polar.keys(words, self.fields(c), [scale[chunk] for scale in scales])
            for key, plane in zip(keys, planes, strict=True):
                total = ops.product(total, key, plane)
        return total

    def fields(self, chunk: int) -> list[tuple[Number, Number]]:
        """Return the codes of angle and radius in a chunk's words, for each slot."""
        fields = []
        for slot in range(self.layout.slots):
            bits = code_bits(self.layout, slot, chunk)
            angle, radius = bits[: self.polar.angle_bits], bits[self.polar.angle_bits :]
            first = radius[0].position
            at = next(at for at in (first, first - 8, 0) if 0 <= at <= 10 - len(radius))
            fields.append((Number.of(angle, 0), Number.of(radius, at, halved=True)))
        return fields


@dataclasses.dataclass(frozen=True)
class Number:
    """Bits of words that make bias + code, or half of it, as fp16 (tiles/layout.py)."""

    runs: tuple[BitRun, ...]
    at: int
    halved: bool

    @classmethod
    def of(cls, bits: Sequence[Bit], at: int, halved: bool = False) -> Number:
        """Put the lowest bit of a code at bit `at` of the number, or of half of it."""
        runs: list[BitRun] = []
        for place, bit in enumerate(bits, at):
            shift, mask = bit.position - place, 1 << place
            if runs and runs[-1][:3] == (bit.set, bit.tile, shift):
                runs[-1] = runs[-1]._replace(mask=runs[-1].mask | mask)
            else:
                runs.append(BitRun(bit.set, bit.tile, shift, mask))
        return cls(tuple(runs), at, halved)

    @property
    def _exponent(self) -> int:
        return (24 if self.halved else 25) - self.at

    @property
    def bias(self) -> int:
        return 1 << (self._exponent - 15)

    def codes(self, words: Sequence[jax.Array], width: int) -> jax.Array:
        """Return the codes of interpreted words, or half of them, in fp32."""
        codes = jnp.uint32(0)
        for run in self.runs:
            tile = words[run.set][:, :, run.tile * width : (run.tile + 1) * width]
            wide = lax.bitcast_convert_type(tile, jnp.uint16).astype(jnp.uint32)
            by = np.uint32(abs(run.shift))
            moved = wide >> by if run.shift >= 0 else wide << by
            codes = codes | (moved & np.uint32(run.mask))
        return (codes >> np.uint32(self.at)).astype(jnp.float32) * (0.5 if self.halved else 1.0)

    def register(self, words: Sequence[np.ndarray], row: int, column: int, width: int) -> Any:
        """Return the numbers of two pairs. `column` counts the registers of the chunk."""
        number: list[Any] = []
        for run in self.runs:
            bits = words[run.set][row, run.tile * width // SIDE + column]
            if run.shift:
                move = "shr" if run.shift > 0 else "shl"
                bits = asm(f"{move}.b32 $0, $1, {abs(run.shift)};", bits)
            # The mask removes bits that cross from one half of the register into the other.
            rest = "$2" if number else f"{(self._exponent << 10) * PAIR:#x}"
            form = f"lop3.b32 $0, $1, {run.mask * PAIR:#x}, {rest}, 0xea;"
            number = [asm(form, bits, *number)]
        return number[0]


@dataclasses.dataclass(frozen=True)
class Polar:
    """The operations, in PTX or, if `interpret`, in array operations that round where PTX does."""

    interpret: bool
    angle_bits: int

    @property
    def _start(self) -> float:
        """Return what times the step is added to a biased code times the step."""
        return -float(BIAS + (1 << (self.angle_bits - 1)))

    def middles(self, step: Any, minimum: Any, columns: int) -> list[jax.Array]:
        """Return cos(m) and sin(m) in fp16, [WARPS, columns, pairs] with equal rows.

            m = least + step / 2 - (bias step + start step),    start step rounded to fp16

        Args:
            step, least: of a group's angles, [n, pairs] in shared memory. Neighbouring warps may
                share an entry.
        """
        entries, pairs = step.shape
        shape = WARPS, columns, pairs
        if self.interpret:
            of_group = (lax.bitcast_convert_type(ref[...], jnp.float16) for ref in (step, minimum))
            step, minimum = (x.astype(jnp.float32) for x in of_group)
            middle = step * (0.5 - BIAS) + minimum - _rounded(step * self._start)
            middle = jnp.repeat(middle, WARPS // entries, axis=0)[:, None]
            return [
                jnp.broadcast_to(f(middle).astype(jnp.float16), shape) for f in (jnp.cos, jnp.sin)
            ]
        inline: Any = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),) * 2,
            return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=LANES)] * 2,
        )

        @inline
        def middles(ctx: Any, *refs: ir.Value) -> list[mgpu.FragmentedArray]:
            registers: tuple[list[Any], list[Any]] = ([], [])
            for first in range(0, pairs, OF_WARP):
                of_lane = self.of_lane(*(_two_of_lane(ref, first) for ref in refs))
                for matrix in range(min(pairs - first, OF_WARP) // SIDE):
                    for row, value in zip(registers, of_lane, strict=True):
                        row.append(_from_row(value, matrix))
            f16 = ir.F16Type.get()
            grids = [np.tile(cast(row, f16), (columns // SIDE, 1)) for row in registers]
            return [fragment(of_both, shape, f16) for of_both in grids]

        return list(middles(step, minimum))

    def keys(
        self,
        words: Sequence[jax.Array],
        fields: Sequence[tuple[Number, Number]],
        scales: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Return r cos(x) and r sin(x) of half of the radii of a chunk, [WARPS, SPAN, width] in
        fp16.

        Args:
            words: of each plane set, [WARPS, rows, words].
            fields: the codes of angle and radius in them, for each slot.
            scales: step and least value of the radii, and step of the angles, [WARPS, SIDE, width]
                in fp16 with equal rows.
        """
        width = scales[0].shape[2]
        if self.interpret:
            slots = [self._interpreted(words, *numbers, scales) for numbers in fields]
            return [jnp.concatenate(parts, 1) for parts in zip(*slots, strict=True)]
        shape = WARPS, SPAN, width
        inline: Any = plgpu.inline_mgpu(
            arg_types=(LANES,) * (len(words) + len(scales)),
            return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=LANES)] * 2,
        )

        @inline
        def keys(ctx: Any, *arrays: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
            i32, f16 = ir.IntegerType.get_signless(32), ir.F16Type.get()
            grids = [grid(array) for array in arrays]
            for of_array in grids:
                of_array[:] = [[utils.bitcast(x, i32) for x in row] for row in of_array]
            sides = self.registers(grids[: len(words)], fields, grids[len(words) :])
            of_sides = (cast(side.flatten(), f16).reshape(side.shape) for side in sides)
            return [fragment(side, shape, f16) for side in of_sides]

        return list(keys(*words, *scales))

    def of_lane(self, step: Any, minimum: Any) -> list[Any]:
        """Return cos(m) and sin(m) of two pairs in registers of two fp16 numbers."""
        form = _MIDDLES.replace("START", _halves(self._start))
        return asm(form, step, minimum, results=2)

    def registers(
        self,
        words: Sequence[np.ndarray],
        fields: Sequence[tuple[Number, Number]],
        scales: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Return the result of `keys` in 32-bit registers [SPAN / SIDE, width / SIDE]."""
        columns, form = [], _OF_SCALES.replace("START", _halves(self._start))
        for step, minimum, turn in zip(*(scale[0] for scale in scales), strict=True):
            columns.append([step, turn, *asm(form, step, minimum, turn, results=2)])
        rows, width = len(words[0]), SIDE * len(columns)
        sides = [np.empty((len(fields) * rows, len(columns)), dtype=object) for _ in range(2)]
        for slot, row, column in np.ndindex(len(fields), rows, len(columns)):
            codes = [number.register(words, row, column, width) for number in fields[slot]]
            form = _KEYS.replace("BIAS", _halves(-fields[slot][1].bias))
            pair = asm(form, *codes, *columns[column], results=2)
            for side, register in zip(sides, pair, strict=True):
                side[slot * rows + row, column] = register
        return sides

    def _interpreted(
        self, words: Sequence[jax.Array], angle: Number, radius: Number, scales: Sequence[jax.Array]
    ) -> list[jax.Array]:
        width = scales[0].shape[2]
        step, minimum, turn = (scale[:, :1].astype(jnp.float32) for scale in scales)
        # A product of fp16 numbers is exact in fp32.
        x = _rounded((BIAS + angle.codes(words, width)) * turn + _rounded(turn * self._start))
        offset = _rounded(step * 0.25 + _rounded(minimum * 0.5))
        r = _rounded(radius.codes(words, width) * step + offset)
        square = _rounded(x * x)

        def polynomial(coefficients: Sequence[float]) -> jax.Array:
            a, b, c = (np.float32(np.float16(x)) for x in coefficients)
            return _rounded(_rounded(square * c + b) * square + a)

        sine = _rounded(polynomial(SINE) * x)
        scaled = _rounded(r * sine)
        keys = r - scaled * sine, scaled * polynomial(COSINE)
        return [_rounded(key).astype(jnp.float16) for key in keys]


def _rounded(x: jax.Array) -> jax.Array:
    """Round to fp16 and back. A conversion there and back may be left out by XLA."""
    return lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


def _halves(number: float) -> str:
    """Return a number as both halves of a register."""
    return f"{int(np.float16(number).view(np.uint16)) * PAIR:#x}"


def _polynomial(to: str, coefficients: Sequence[float]) -> str:
    a, b, c = map(_halves, coefficients)
    return (
        f" mov.b32 {to}, {c}; mov.b32 k, {b}; fma.rn.f16x2 {to}, {to}, z, k;"
        f" mov.b32 k, {a}; fma.rn.f16x2 {to}, {to}, z, k;"
    )


# Of biased codes of angles and of half of the radii; of steps of radii and of angles; of offsets of
# half of the radii, and of the start of angles.
_KEYS = (
    "{ .reg .b32 x, z, s, c, r, k; fma.rn.f16x2 x, $2, $5, $7; mul.rn.f16x2 z, x, x;"
    f"{_polynomial('s', SINE)} mul.rn.f16x2 s, s, x;{_polynomial('c', COSINE)}"
    " mov.b32 k, BIAS; add.rn.f16x2 r, $3, k; fma.rn.f16x2 r, r, $4, $6;"
    " mul.rn.f16x2 x, r, s; neg.f16x2 z, x;"
    " fma.rn.f16x2 $0, z, s, r; mul.rn.f16x2 $1, x, c; }"
)
# Of steps and least values of radii, and steps of angles.
_OF_SCALES = (
    f"{{ .reg .b32 k, r; mov.b32 k, {_halves(0.5)}; mul.rn.f16x2 r, $3, k;"
    f" mov.b32 k, {_halves(0.25)}; fma.rn.f16x2 r, $2, k, r;"
    " mov.b32 k, START; mul.rn.f16x2 $1, $4, k; mov.b32 $0, r; }"
)


def _of_half(i: int) -> str:
    return (
        f" cvt.f32.f16 t, k{i}; cvt.f32.f16 s, s{i}; cvt.f32.f16 l, l{i};"
        f" fma.rn.f32 s, s, 0f{np.float32(0.5 - BIAS).view(np.uint32):08x}, l; sub.rn.f32 s, s, t;"
        f" cos.approx.ftz.f32 c{i}, s; sin.approx.ftz.f32 f{i}, s;"
    )


# Of steps and least values of angles.
_MIDDLES = (
    "{ .reg .b32 k; .reg .b16 k0, k1, s0, s1, l0, l1; .reg .f32 t, s, l, c0, c1, f0, f1;"
    " mov.b32 k, START; mul.rn.f16x2 k, $2, k; mov.b32 {k0, k1}, k;"
    " mov.b32 {s0, s1}, $2; mov.b32 {l0, l1}, $3;"
    f"{_of_half(0)}{_of_half(1)}"
    " cvt.rn.f16x2.f32 $0, c1, c0; cvt.rn.f16x2.f32 $1, f1, f0; }"
)


def _two_of_lane(ref: ir.Value, first: int) -> ir.Value:
    """Load two of OF_WARP neighbouring numbers of the warp's entry for each lane, or, if there are
    fewer, the same for several lanes."""
    i32 = ir.IntegerType.get_signless(32)
    kind = ir.MemRefType(ref.type)
    (entries, pairs), (stride, _) = kind.shape, kind.get_strides_and_offset()[0]
    entry = arith.divui(warp(), utils.c(WARPS // entries, i32))
    number = arith.remui(twice(lane()), utils.c(min(pairs, OF_WARP), i32))
    offset = arith.addi(arith.muli(entry, utils.c(stride, i32)), number)
    offset = arith.addi(offset, utils.c(first, i32))
    return llvm.load(i32, utils.getelementptr(utils.memref_ptr(ref), [offset], ref_dtype(ref)))


def _from_row(value: ir.Value, row: int) -> ir.Value:
    """Return the register of the lane that holds this lane's columns in a row of a matrix."""
    i32 = ir.IntegerType.get_signless(32)
    source = arith.addi(arith.remui(lane(), utils.c(4, i32)), utils.c(4 * row, i32))
    return asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", value, source)
