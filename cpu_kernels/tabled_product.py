"""Products of rows with matrices whose outputs have tables of their own, in C++ on the threads of
XLA.

    w[i, o] = value of the sparse entry (o, i), or levels[o, code[o, i]]        y = x w

Values and levels become fp32 in registers. A row's result does not depend on the other rows, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from cpu_kernels.library import TABLED_PRODUCT, unavailable


def tabled_products(
    x: Float[Array, "T I"], matrices: Sequence[Sequence[Shaped[Array, "..."]]]
) -> list[Float[Array, "T _"]]:
    """Return x w, fp32, for each matrix w.

    Args:
        x: [T, I], any float dtype, which becomes fp32.
        matrices: for each, in this order,
            codes, uint32 [O, I / 8]: bits 4 j of word w are those of input 8 w + j;
            levels, float16, bfloat16 or float32 [O, 16];
            starts, int32 [O + 1], rising from 0 to n: where the sparse entries of each output are;
            inputs of the sparse entries, uint16 [n];
            values of the sparse entries, as levels [n]. Their codes must be 0.

    Raises ValueError if the library is missing. Arrays that do not fit together are an XLA error
    when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    call = jax.ffi.ffi_call(
        TABLED_PRODUCT,
        [jax.ShapeDtypeStruct((len(x), len(codes)), jnp.float32) for codes, *_ in matrices],
        vmap_method="sequential",
    )
    return list(call(x.astype(jnp.float32), *(array for arrays in matrices for array in arrays)))
