"""Bounded compilation: a program is compiled for each shape, so tokens are padded to a few widths.

    16, 24, 32, 48, 64, 96, 128, ...    powers of two and the halves between them, up to the
                                        cache's capacity

Lengths say which tokens are real. Padding enters no window, no statistic and no block. Token ids at
padding become 0 and the width follows the longest row, so however you pad a request, it runs the
same program on the same arguments and gives the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32, Shaped

MIN_WIDTH = 16


def bucket(tokens: int) -> int:
    """Return the width of the program that serves this many tokens."""
    width = max(MIN_WIDTH, 1 << (tokens - 1).bit_length())
    return width * 3 // 4 if width > MIN_WIDTH and tokens <= width * 3 // 4 else width


def padded(
    tokens: Int32[np.ndarray, "B T"], lengths: Int32[np.ndarray, "B"], capacity: int
) -> Int32[np.ndarray, "B W"]:
    """Return the real tokens of each row, padded with zeros to the width that serves the longest,
    at most `capacity`."""
    longest = int(lengths.max(initial=0))
    wide = np.zeros((tokens.shape[0], min(bucket(longest), capacity)), np.int32)
    wide[:, :longest] = np.where(np.arange(longest) < lengths[:, None], tokens[:, :longest], 0)
    return wide


def resized(
    array: Shaped[Array, "B W ..."], width: int, fill: float = 0
) -> Shaped[Array, "B T ..."]:
    """Return the array with its second axis cut or filled up to `width`.

    This compiles nothing on a CPU: a program would be needed for each width, even by `jnp.asarray`
    of a NumPy array.
    """
    if array.shape[1] == width:
        return array
    missing = [(0, 0), (0, max(width - array.shape[1], 0)), *[(0, 0)] * (array.ndim - 2)]
    if isinstance(array, Tracer) or jax.default_backend() != "cpu":
        return jnp.pad(array[:, :width], missing, constant_values=fill)
    return jax.device_put(np.pad(np.asarray(array)[:, :width], missing, constant_values=fill))
