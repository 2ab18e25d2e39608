"""Codebooks of non-uniform number formats: sorted levels in [-1, 1], the code of a number, and the
level of a code.

    code(y) = index of the nearest level, the lower one on a tie
    level(code) = levels[code]

Source of NormalFloat: Dettmers et al., QLoRA, section 3 and Appendix E.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt8

# The largest level before scaling is this quantile. QLoRA uses it for 4 bits. Here it also serves 2
# and 3 bits.
NORMAL_FLOAT_TAIL = 0.9677083


@functools.cache
def uniform_levels(bits: int) -> tuple[float, ...]:
    """Return 2^bits equally spaced levels from -1 to 1."""
    return tuple(float(level) for level in np.linspace(-1, 1, 2**bits))


@functools.cache
def normal_float_levels(bits: int) -> tuple[float, ...]:
    """Return quantiles of a normal distribution, scaled to [-1, 1].

    There are 2^(bits-1) positive levels, an exact 0, and one negative level fewer.
    """
    from statistics import NormalDist  # here, as it takes time to import

    quantile, half = NormalDist().inv_cdf, 2 ** (bits - 1)
    positive = [quantile(p) for p in np.linspace(NORMAL_FLOAT_TAIL, 0.5, half + 1)[:-1]]
    negative = [-quantile(p) for p in np.linspace(NORMAL_FLOAT_TAIL, 0.5, half)[:-1]]
    largest = max(positive)
    return tuple(sorted(level / largest for level in (*positive, 0.0, *negative)))


def nearest_codes(y: Float[Array, "..."], levels: Float[Array, " entries"]) -> UInt8[Array, "..."]:
    """Return the index of the nearest of up to 256 sorted levels, the lower one on a tie."""
    between = (levels[1:] + levels[:-1]) / 2
    codes = jnp.zeros(y.shape, jnp.uint8)
    for i in range(between.shape[0]):
        codes += (y > between[i]).astype(jnp.uint8)
    return codes


def look_up(
    levels: Float[Array, "entries ..."], codes: Integer[Array, "..."]
) -> Float[Array, "..."]:
    """Return levels[codes] for 2^n levels, by a tree of selects.

    Bit 0 of a code halves the entries, bit 1 halves the rest, and so on.

    XLA's CPU backend vectorizes selects, but no gather (docs/decisions/packed_layout.md).
    """
    entries = [levels[i] for i in range(levels.shape[0])]
    bit = 0
    while len(entries) > 1:
        chosen = ((codes >> bit) & 1) != 0
        entries = [
            jnp.where(chosen, high, low)
            for low, high in zip(entries[::2], entries[1::2], strict=True)
        ]
        bit += 1
    return entries[0]
