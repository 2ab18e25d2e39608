"""The array of runs: rows of normalized channels in runs of one width each, and one logarithmic
scale for each token and head.

    code = clip(floor(u / (g step_b)), -2^(b-1), 2^(b-1) - 1)
    u^   = g (code + 1/2) step_b
    g    = 2^(scale / 8)

b is the width of the run that a channel is in, and step_b the step of the best uniform quantizer of
a normal variable. g is the root mean square of a token's stored channels, or more if a channel of
at least UNCLIPPED bits needs it for its largest code. Codes are packed with 2^(b-1) added. Entries
that are not finite count as 0 or saturate.

Such u^ are shorter than u, because an interval's level is about its mean: u . u^ < |u|^2. An
unbiased array stores another scale with the same codes, for which u . u^ = |u|^2 (up to the scale's
rounding), so that errors are not along u and average out in a sum over tokens.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from kvq_jax.arrays.packing import PlaneLayout, Words, pack, run_layout, unpack
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import OutOfRange
from kvq_jax.types.array_types import Axis
from kvq_jax.types.pytree import describe, pytree

PER_OCTAVE = 8  # steps of the logarithmic scale in a factor of 2
MIN_SCALE, MAX_SCALE = -128, 127  # g from 1.5e-5 to 6e4
MAX_ENTRY = 1e18  # its square is finite in fp32
# From this many bits on, no channel is clipped: a clipped entry costs more there than the longer
# steps (docs/decisions/calibration.md).
UNCLIPPED = 5
MAX_UNBIASING = 2.0  # times g, at most: a row far from normal would get a factor that is all noise


@dataclasses.dataclass(frozen=True)
class RunFormat:
    """The quantization format of a body. Static and hashable.

    widths: bits of the chunks of a row's channels, the widest first. Chunks of width 0 are not
        stored.
    """

    channels: int
    block: int
    widths: tuple[int, ...]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (width, channels) of the stored runs of one width."""
        chunk = self.channels // len(self.widths)
        return tuple(
            (width, chunk * len(tuple(same)))
            for width, same in itertools.groupby(self.widths)
            if width
        )

    @property
    def stored_channels(self) -> int:
        return sum(channels for _, channels in self.runs)

    @property
    def layouts(self) -> tuple[PlaneLayout, ...]:
        return tuple(run_layout(width, channels, self.block) for width, channels in self.runs)

    @property
    def ends(self) -> Float[np.ndarray, " stored"]:
        """Return the largest |u| / g that the codes of each stored channel reach, if it bounds g:
        2^(b-1) step_b, or infinity below UNCLIPPED bits."""
        reach = [
            2 ** (width - 1) * STEPS[width] if width >= UNCLIPPED else np.inf
            for width, _ in self.runs
        ]
        return np.repeat(np.asarray(reach, np.float32), [channels for _, channels in self.runs])


@pytree
@dataclasses.dataclass(frozen=True)
class RunArray:
    """The words of each run, the widest first, and the scale of each token: 2^(scale / 8)."""

    words: tuple[Words, ...]
    scale: Int8[Array, "B K S"]
    format: RunFormat = dataclasses.field(metadata={"static": True})

    def out_of_range(self) -> OutOfRange:
        """Return which tokens meet an end of the range of scales. A token of zeros has the least
        scale too, but no code of a negative number."""
        negative = jnp.any(levels(self) < 0, axis=(1, 3))
        least = jnp.all(self.scale == MIN_SCALE, axis=1)
        return OutOfRange(jnp.any(self.scale == MAX_SCALE, axis=1), least & negative)


def specs(format: RunFormat, batch: int, heads: int, tokens: int) -> RunArray:
    """Describe the arrays of a body of `tokens` tokens."""
    words = tuple(word_specs(layout, batch, heads, tokens) for layout in format.layouts)
    scale = BodySpec(
        (Axis("batch", batch), Axis("kv_heads", heads), Axis("tokens", tokens)), "int8"
    )
    return describe(RunArray, words=words, scale=scale, format=format)


def quantize(
    u: Float[Array, "B K T stored"], format: RunFormat, *, unbiased: bool = False
) -> RunArray:
    """Quantize the stored channels of rows.

    unbiased: True for the scale with u . u^ = |u|^2.
    """
    u = jnp.clip(jnp.where(jnp.isnan(u), 0, u), -MAX_ENTRY, MAX_ENTRY)
    size = jnp.maximum(
        jnp.sqrt(jnp.mean(jnp.square(u), axis=-1)),
        jnp.max(jnp.abs(u) / format.ends[None, None, None], axis=-1),
    )
    scale = _logarithm(size)
    u = u / factor(scale)
    words, start = [], 0
    for (width, channels), layout in zip(format.runs, format.layouts, strict=True):
        middle = 2 ** (width - 1)
        codes = jnp.floor(u[..., start : start + channels] / STEPS[width]) + middle
        words.append(pack(jnp.clip(codes, 0, 2 * middle - 1).astype(jnp.uint16), layout))
        start += channels
    array = RunArray(tuple(words), scale, format)
    if not unbiased:
        return array
    # Levels have the signs of their entries, so the product is 0 for zeros alone.
    product = jnp.sum(u * levels(array), axis=-1)
    gain = jnp.sum(jnp.square(u), axis=-1) / jnp.where(product > 0, product, 1)
    size = jnp.minimum(gain, MAX_UNBIASING) * factor(scale)[..., 0]
    return dataclasses.replace(array, scale=_logarithm(size))


def _logarithm(size: Float[Array, "B K T"]) -> Int8[Array, "B K T"]:
    octaves = jnp.round(PER_OCTAVE * jnp.log2(jnp.maximum(size, 1e-30)))
    return jnp.clip(octaves, MIN_SCALE, MAX_SCALE).astype(jnp.int8)


def levels(array: RunArray) -> Float[Array, "B K T stored"]:
    """Return u^ / g of the stored channels."""
    parts = []
    for layout, words in zip(array.format.layouts, array.words, strict=True):
        parts.append(
            (unpack(words, layout).astype(jnp.float32) + (0.5 - 2 ** (layout.bits - 1)))
            * STEPS[layout.bits]
        )
    return jnp.concatenate(parts, axis=-1)


def factor(scale: Int8[Array, "B K T"]) -> Float[Array, "B K T 1"]:
    """Return g of each token, by which its channels are multiplied."""
    return jnp.exp2(scale.astype(jnp.float32)[..., None] / PER_OCTAVE)
