"""Read keys in polar form: an angle and a radius for each RoPE pair.

One cosine and one sine are computed for every code. A table of a group's 16 angles would have to be
made again for each tile, and take more registers than there are (docs/kernels.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16

from pallas_kernels.readers.base import LoopStep, Reader, SlotRows
from pallas_kernels.readers.shared import add_up, channel_scale, dot, for_tokens, query_planes
from pallas_kernels.tiles.arithmetic import multiply_add, subtract_scale_add
from pallas_kernels.tiles.halves import Half, by_halves, joined
from pallas_kernels.tiles.layout import PlaneLayout
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.tiles.words import Bit, WordTiles, code_bits, read_words
from pallas_kernels.triton_call import plt


@dataclasses.dataclass(frozen=True)
class PolarReader(Reader):
    """Keys as angle and radius of each RoPE pair (i, i + H/2): k_i = r cos(theta), k_{i+H/2} = r
    sin(theta). PolarQuant (Wu et al.).

    Stored arrays: one code per pair, radius code << angle_bits | angle code (as in the public
    code), packed like the codes of H/2 channels: int16 words of each plane set [B, K, S / slots,
    tiles * W]; then step and least value of the radii, and of the angles, of a pair and a group of
    tokens: [B, K, S / group, H/2], perhaps as uint16 that holds the bits. Both are dequantized at
    bin centres:

        r     = (radius code + 1/2) * step + least
        theta = (angle code + 1/2) * step + least       |theta| < 3 pi

    cos, sin, r and the key are rounded to fp16. Two dots multiply the key with the halves of q.
    Before that, cos and sin have an error of 4e-5, plus the rounding of theta: 5e-5 for steps of up
    to 0.4 (4 bits), in proportion for larger ones. A table of q_i cos + q_{i+H/2} sin for each
    query head would take a select tree for each head, and leave nothing for tensor cores. There are
    only scores, because PolarQuant's values are in full precision.
    """

    layout: PlaneLayout
    angle_bits: int
    group: int
    scale_dtype: str = "float16"

    @property
    def slots(self) -> int:
        return self.layout.slots

    @property
    def chunks(self) -> tuple[int, int]:
        return 2 * self.layout.chunks, self.layout.width

    @property
    def row_bytes(self) -> int:
        return self.layout.bits * self.layout.channels // 8

    @property
    def step(self) -> LoopStep:
        # Cosines in array operations: one warp does not hold the smallest step of 256 channels.
        channels = 2 * self.layout.channels
        return LoopStep(4096 // channels, warps=2 if channels == 256 else 1)

    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        if len(stored) != (wanted := len(self.layout.sets) + 4):
            raise ValueError(
                f"{len(stored)=}: {self.layout.bits}-bit words, and step and least of radii and"
                f" angles, are {wanted} arrays"
            )
        return tuple(stored)

    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        return (query_planes(q, 2 * self.layout.chunks),)

    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        words, scales = read_words(refs, self.layout, tile, 1, asm), refs[len(self.layout.sets) :]
        pairs, scores = self.layout.chunks, []
        for slot in range(self.slots):
            dots = []
            for c in range(pairs):
                bits = code_bits(self.layout, slot, c)
                of_radii, of_angles = (
                    self._of_groups(refs, c, tile) for refs in (scales[:2], scales[2:])
                )
                cos, sin = self._cos_sin(words, bits[: self.angle_bits], of_angles, asm)
                code, bias = words.number(bits[self.angle_bits :])
                step, minimum = (for_tokens(s, code.shape[0]) for s in of_radii)
                radius = subtract_scale_add(code, bias - 0.5, step, minimum, asm)
                first, second = by_halves(lambda r, cos, sin: (r * cos, r * sin), radius, cos, sin)
                dots += [
                    dot(joined(first), query[0][c], (1, 1)),
                    dot(joined(second), query[0][pairs + c], (1, 1)),
                ]
            scores.append(add_up(dots))
        return scores

    def weigh(
        self, weights: SlotRows, refs: Sequence[Any], tile: Tile, sums: list[Array], asm: bool
    ) -> list[Array]:
        raise NotImplementedError("polar codes hold keys; values need another reader")

    def _of_groups(
        self, refs: Sequence[Any], chunk: int, tile: Tile
    ) -> list[Float16[Array, "groups 1 W"]]:
        return [
            channel_scale(ref, self.layout, chunk, tile, self.group, self.scale_dtype)
            for ref in refs
        ]

    def _cos_sin(
        self,
        words: WordTiles,
        bits: Sequence[Bit],
        of_groups: Sequence[Float16[Array, "groups 1 W"]],
        asm: bool,
    ) -> tuple[Half, Half]:
        code, bias = words.number(bits)
        step, minimum = (s.astype(jnp.float32) for s in of_groups)
        # Applied once per group, the bias of a code costs its elements nothing.
        start = minimum - (bias - 0.5) * step
        step, start = (for_tokens(s, code.shape[0]) for s in (step, start))
        cos_sin = approximate_cos_sin if asm else polynomial_cos_sin

        def of_codes(code: Array, step: Array, start: Array) -> tuple[Array, Array]:
            cos, sin = cos_sin(code.astype(jnp.float32), step, start)
            return cos.astype(jnp.float16), sin.astype(jnp.float16)

        return by_halves(of_codes, code, step, start)


# cos(2 pi x) and sin(2 pi x) / x for |x| <= 1/2 in powers of x^2, lowest first: minimax, with
# largest errors of 4e-5 and 6e-6.
COSINE = (0.99995979, -19.73104148, 64.67342568, -82.40350831, 45.64645803)
SINE = (6.28305579, -41.33121394, 81.36680896, -74.47796535, 32.78132138)
# Added to a number below 2^22 and subtracted again, it leaves the nearest whole number.
ROUNDER = 1.5 * 2**23
TURN = 2 * math.pi

Theta = Float[Array, "rows W"]


def polynomial_cos_sin(code: Theta, step: Theta, start: Theta) -> tuple[Theta, Theta]:
    """Return cos and sin of code * step + start, in fp32. The library's functions reduce any angle,
    with branches and local memory.
    """
    turns = code * (step / TURN) + start / TURN
    # The maximum separates the two constants, which XLA would otherwise combine when it interprets
    # the kernel.
    x = turns - (jnp.maximum(turns + np.float32(ROUNDER), 0.0) - np.float32(ROUNDER))
    return _polynomial(COSINE, x * x), _polynomial(SINE, x * x) * x


def _polynomial(coefficients: Sequence[float], x: Theta) -> Theta:
    value = jnp.full(x.shape, coefficients[-1], jnp.float32)
    for coefficient in coefficients[-2::-1]:
        value = value * x + np.float32(coefficient)
    return value


def approximate_cos_sin(code: Theta, step: Theta, start: Theta) -> tuple[Theta, Theta]:
    """Return cos and sin of code * step + start, in fp32, by one instruction each.

    Absolute error 2^-20 for |theta| <= pi, and a few times that for some turns more.
    """
    theta = multiply_add(code, step, start, True)
    return _approximate("cos", theta), _approximate("sin", theta)


def _approximate(name: Literal["cos", "sin"], theta: Theta) -> Theta:
    [value] = plt.elementwise_inline_asm(
        f"{name}.approx.ftz.f32 $0, $1;",
        args=[theta],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(theta.shape, jnp.float32)],
    )
    return value
