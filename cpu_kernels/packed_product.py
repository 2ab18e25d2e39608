"""Products of rows with matrices of packed weights, in C++ on the threads of XLA.

    w[i, o] = (code[i, o] - centre) scale[i // group, o] + min[i // group, o]        y = x w
    w[i, o] = levels[code[i, o]] scale[i // group, o]        for codes of levels

Of a stack of experts' matrices, each row meets one, and matrices that no row chooses are not read.
Scales and minima are applied once for each group of inputs, to sums of codes times x. A row's
result does not depend on the other rows, bit for bit.

Processors with AVX512-VNNI add products of bytes. There x[i] is a scale for each group of inputs
times an integer of 24 bits (three digits), off by at most 2^-23 of the largest of its group, which
is as exact as fp32 sums are. Elsewhere, and for numbers of FP8 and of 16 bits, w becomes fp32 in
registers. With one digit x is rounded to 8 bits, unless the weights are such numbers, and AVX2 adds
products of bytes too if codes have 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from cpu_kernels.library import PACKED_PRODUCT, unavailable

PANEL = 32  # outputs that lie together (kPanelOutputs of csrc/weights.h)
LEVELS = 16  # of codes of 4 bits


Arrays: TypeAlias = Sequence[Shaped[Array, "_ ..."] | None]


def packed_products(
    x: Float[Array, "T I"],
    matrices: Sequence[Arrays],
    *,
    outputs: Sequence[int],
    centres: Sequence[int],
    levels: Sequence[Sequence[float] | None] | None = None,
    digits: int = 3,
    chosen: Int[Array, "T"] | None = None,
    experts: int = 1,
) -> list[Float[Array, "T _"]]:
    """Return x w, fp32, for each matrix w.

    Args:
        x: [T, I], any float dtype, which becomes fp32. I is a multiple of 32.
        matrices: for each, in this order,
            codes of 4 bits, uint32 [P, I / 8, 32] (csrc/weights.h), of 8 bits, int8 or FP8 (E4M3)
                [P, I / 4, 32, 4], or numbers, bfloat16 or float16 [P, I, 32];
            scales, float16, bfloat16 or float32 [P, I / group, 32], int8 factors of coarse scales,
                or uint8 exponents of MXFP4; None for numbers. A group is of 32 inputs, or of 16 for
                int8 codes;
            coarse scales, float16 [P, I / 256, 32], or None;
            minima, as scales, or int8 factors of the scales, or None;
            coarse minima, as coarse scales, or None.
        outputs: O of each, 32 (P - 1) < O <= 32 P.
        centres: of each, the 4-bit code that stands for 0, an integer from 0 to 15. 0 for codes
            that are not integers of 4 bits.
        levels: of each, the 16 numbers that 4-bit codes stand for, or None for integers; None if
            all are integers.
        digits: 3, or 1 to round x to q / 127 of the largest of its group, with |q| <= 127.
        chosen: [T], the expert of each row, from 0 to experts - 1, or None without experts.
        experts: how many matrices lie behind each other in the first axis, of experts P panels.

    Raises ValueError if the library is missing. Arrays that do not fit together are an XLA error
    when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    none = jnp.zeros(0, jnp.float16)
    call = jax.ffi.ffi_call(
        PACKED_PRODUCT,
        [jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32) for columns in outputs],
        vmap_method="sequential",
    )
    x = x.astype(jnp.float32)
    arrays = [none if array is None else array for arrays in matrices for array in arrays]
    choice = jnp.zeros(0, jnp.int32) if chosen is None else chosen.astype(jnp.int32)
    given = [None] * len(outputs) if levels is None else levels
    tables = [(np.nan,) * LEVELS if table is None else table for table in given]
    attributes = dict(
        centres=np.array(centres, np.float32),
        levels=np.array(tables, np.float32).reshape(-1),
        digits=np.int64(digits),
        experts=np.int64(experts),
    )
    return list(call(x, choice, *arrays, **attributes))
