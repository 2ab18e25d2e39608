"""Keys in polar form: an angle and a radius for each RoPE pair.

    instructions per element       jnp            asm
    grid, table, 3 / 4 bits        12.5 / 15.5    5 / 6.5
    grouped, table, 3 / 4 bits     14 / 23        6.5 / 11
    trigonometry                   a library      6, one of them at an eighth of the rate

Counted from the formulation for one channel of one token, without loads, dots, and making table entries (docs/kernels.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float16

from pallas_kernels.lookup import Bit, Words, chosen, code_bits, negated, number, selector
from pallas_kernels.parts import add_up, channel_statistic, dot, for_tokens, query_planes
from pallas_kernels.planes import Planes, multiply_add, subtract_scale_add
from pallas_kernels.sides import Rows, Side
from pallas_kernels.tile import SPAN, Tile


@dataclasses.dataclass(frozen=True)
class Polar(Side):
    """Keys as angle and radius of each RoPE pair (i, i + H/2): k_i = r cos(theta), k_{i+H/2} = r sin(theta). PolarQuant (Wu et al.).

    Assumed of the storage: one code for a pair, radius code << angle_bits | angle code (as the public code has it), packed like the codes
    of H/2 channels: int16 words of each plane set [B, K, S / slots, tiles * W]; then radius scale and zero [B, K, S / group, H/2], of a
    pair and a group of tokens; where angles == "grouped", angle scale and zero of the same shape. Both are decoded at bin centres:

        r     = (radius code + 1/2) * scale + zero
        theta = (angle code + 1/2) * 2 pi / 2^angle_bits                 angles == "grid"
        theta = (angle code + 1/2) * angle scale + angle zero            angles == "grouped", |theta| < 3 pi

    cos and sin of a code, shared by all query heads, become an fp16 key, which two dots multiply with the halves of q. `formula` says how:
    "table" chooses from 2^angle_bits entries (grid: 2^angle_bits / 4 constants, and the quadrant from two bits of the code; grouped: made
    once for each group in the tile), "trigonometry" calculates each one: for groups cheaper in asm (approximate instructions), always far
    dearer in jnp (a library). "faster" is the one of fewer instructions: trigonometry for groups in asm, else the table.
    A table of q_i cos + q_{i+H/2} sin for each query head would take a select tree for each head, and leave nothing for tensor cores.
    Scores only: PolarQuant's values are exact.
    """

    planes: Planes
    angle_bits: int
    group: int
    angles: Literal["grid", "grouped"] = "grid"
    formula: Literal["faster", "table", "trigonometry"] = "faster"
    scale_dtype: str = "float16"

    @property
    def slots(self) -> int:
        return self.planes.slots

    @property
    def least_tile(self) -> int:
        return max(SPAN, self.group)

    @property
    def chunks(self) -> tuple[int, int]:
        return 2 * self.planes.chunks, self.planes.width

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        wanted = len(self.planes.sets) + (2 if self.angles == "grid" else 4)
        if len(stored) != wanted:
            raise ValueError(f"{len(stored)=}: angles={self.angles!r} with {self.planes.bits} bits is {wanted} arrays")
        return tuple(stored)

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        return (query_planes(q, 2 * self.planes.chunks),)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        words, statistics = Words.read(refs, self.planes, tile), refs[len(self.planes.sets) :]
        pairs, found = self.planes.chunks, []
        for slot in range(self.slots):
            dots = []
            for c in range(pairs):
                bits = code_bits(self.planes, slot, c)
                cos, sin = self._cos_sin(words, bits[: self.angle_bits], statistics[2:], c, tile, asm)
                code, bias = number(words, bits[self.angle_bits :], asm)
                scale, zero = (for_tokens(s, code.shape[0]) for s in self._of_groups(statistics[:2], c, tile))
                radius = subtract_scale_add(code, bias - 0.5, scale, zero, asm)
                dots += [dot(radius * cos, query[0][c], (1, 1)), dot(radius * sin, query[0][pairs + c], (1, 1))]
            found.append(add_up(dots))
        return found

    def weigh(self, weights: Rows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool) -> list[Array]:
        raise NotImplementedError("polar codes hold keys; values need another side")

    def _of_groups(self, refs: Sequence[Any], chunk: int, tile: Tile) -> list[Float16[Array, "groups 1 W"]]:
        return [channel_statistic(ref, self.planes, chunk, tile, self.group, self.scale_dtype) for ref in refs]

    def _cos_sin(self, words: Words, bits: Sequence[Bit], refs: Sequence[Any], chunk: int, tile: Tile, asm: bool) -> tuple[Array, Array]:
        by_table = self.formula == "table" or (self.formula == "faster" and (self.angles == "grid" or not asm))
        if self.angles == "grid" and by_table:
            return quadrant_cos_sin(words, bits, asm)
        rows, count = tile.size // self.slots, 1 << self.angle_bits
        if self.angles == "grouped":
            step, zero = (s.astype(jnp.float32) for s in self._of_groups(refs, chunk, tile))
        else:
            step, zero = jnp.full((1, 1, 1), 2 * math.pi / count, jnp.float32), jnp.zeros((1, 1, 1), jnp.float32)
        if not by_table:
            code, bias = number(words, bits, asm)
            step, zero = (jnp.broadcast_to(for_tokens(s, rows), code.shape) for s in (step, zero))
            theta = multiply_add(code.astype(jnp.float32) - (bias - 0.5), step, zero, asm)
            return trigonometry("cos", theta, asm).astype(jnp.float16), trigonometry("sin", theta, asm).astype(jnp.float16)
        angles = [(e + 0.5) * step + zero for e in range(count)]  # [groups, 1, W] each: a small part of the tile

        def entries(function: Literal["cos", "sin"]) -> list[Array]:
            return [for_tokens(trigonometry(function, angle, asm).astype(jnp.float16), rows) for angle in angles]

        return chosen(words, bits, entries("cos"), asm), chosen(words, bits, entries("sin"), asm)


def quadrant_cos_sin(words: Words, bits: Sequence[Bit], asm: bool) -> tuple[Float16[Array, "rows W"], Float16[Array, "rows W"]]:
    """cos and sin of (code + 1/2) 2 pi / 2^bits. The two high bits are the quadrant, which swaps the two numbers and changes their signs;
    inside a quadrant, sin runs through the cosines backwards."""
    low, (odd, half_turn), count = bits[:-2], bits[-2:], 1 << (len(bits) - 2)
    cosines = [jnp.full((1, 1), math.cos((e + 0.5) * math.pi / 2 / count), jnp.float16) for e in range(count)]
    u, v = chosen(words, low, cosines, asm), chosen(words, low, cosines[::-1], asm)
    turn = selector(words, odd, asm)
    return negated(turn(v, u), words, (odd, half_turn), asm), negated(turn(u, v), words, (half_turn,), asm)


def trigonometry(name: Literal["cos", "sin"], theta: Float[Array, "rows W"], asm: bool) -> Float[Array, "rows W"]:
    """cos or sin in fp32; in asm approximately: absolute error 2^-20 for |theta| <= pi, a few times that for some turns more."""
    if not asm:
        return (jnp.cos if name == "cos" else jnp.sin)(theta)
    [found] = plt.elementwise_inline_asm(
        f"{name}.approx.ftz.f32 $0, $1;",
        args=[theta],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(theta.shape, jnp.float32)],
    )
    return found
