"""Products of rows with a matrix of packed weights, in C++ on the threads of XLA.

    w[i, o] = (code[i, o] - centre) scale[i // group, o] + min[i // group, o]        y = x w

Codes become fp32 in registers. Scales and minima are applied once for each group of inputs, to
sums. A row's result does not depend on the other rows, bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from cpu_kernels.library import PACKED_PRODUCT, unavailable

PANEL = 32  # outputs that lie together (kPanelOutputs of csrc/weights.h)
COARSE = 256  # inputs that share a coarse scale


def packed_product(
    x: Float[Array, "T I"],
    codes: Shaped[Array, "P _ 32"],
    scales: Shaped[Array, "P _ 32"],
    coarse_scales: Shaped[Array, "P _ 32"] | None,
    mins: Shaped[Array, "P _ 32"] | None,
    coarse_mins: Shaped[Array, "P _ 32"] | None,
    *,
    outputs: int,
    centre: int,
) -> Float[Array, "T O"]:
    """Return x w, fp32.

    Args:
        x: [T, I] fp32.
        codes: of 4 bits, uint32 [P, I / 8, 32] (csrc/weights.h), or of 8 bits, int8 [P, I, 32].
        scales: float16 [P, I / group, 32], or int8 factors of coarse_scales.
        coarse_scales: float16 [P, I / 256, 32], or None.
        mins: as scales, or None.
        coarse_mins: as coarse_scales, or None.
        outputs: O, at most 32 P.
        centre: the 4-bit code that stands for 0.

    Raises ValueError if the library is missing. Arrays that do not fit together are an XLA error
    when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    none = jnp.zeros(0, jnp.float16)
    call = jax.ffi.ffi_call(
        PACKED_PRODUCT,
        jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32),
        vmap_method="sequential",
    )
    others = [none if array is None else array for array in (coarse_scales, mins, coarse_mins)]
    return call(x, codes, scales, *others, centre=np.float32(centre))
