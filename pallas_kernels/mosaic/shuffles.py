"""Numbers that pass from one lane of a warp to another, and scalars from lanes.

Like the operations of matrices.py these have two forms: instructions on registers, and array
operations, which the interpreter runs.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# the stubs of MLIR lack results, and types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.registers import LANES, OF_ALL_WARPS, SIDE, element, fragment, grid, lane

_LANES_OF_ROW = 4


def moved_rows(x: jax.Array, interpret: bool, *, across: int = 0, by: int = 0) -> jax.Array:
    """Return a matrix of each warp, [WARPS, SIDE, columns] of 32-bit numbers, whose row i is row
    (i ^ across) + by modulo SIDE."""
    if interpret:
        sources = [((row ^ across) + by) % SIDE for row in range(SIDE)]
        return jnp.concatenate([x[:, row : row + 1] for row in sources], 1)
    shape = x.shape
    inline: Any = plgpu.inline_mgpu(
        arg_types=(LANES,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, layout=LANES)
    )

    @inline
    def moved(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        source = arith.xori(lane(), utils.c(_LANES_OF_ROW * across, i32))
        source = arith.addi(source, utils.c(_LANES_OF_ROW * by, i32))
        source = arith.andi(source, utils.c(_LANES_OF_ROW * SIDE - 1, i32))
        registers = grid(x)
        for place, pair in np.ndenumerate(registers):
            numbers = [
                llvm.inline_asm(
                    i32,
                    [utils.bitcast(element(pair, i), i32), source],
                    "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
                    "=r,r,r",
                    has_side_effects=True,
                )
                for i in range(2)
            ]
            both = ir.VectorType.get((2,), x.mlir_dtype)
            numbers = [utils.bitcast(number, x.mlir_dtype) for number in numbers]
            registers[place] = vector.from_elements(both, numbers)
        return fragment(registers, shape, x.mlir_dtype)

    return moved(x)


def scalar(x: jax.Array, interpret: bool) -> jax.Array:
    """Return the number that all entries of a matrix [SIDE, SIDE] are, the same in every warp."""
    if interpret:
        return x[0, 0]
    inline: Any = plgpu.inline_mgpu(
        arg_types=(OF_ALL_WARPS,),
        return_type=plgpu.ShapeDtypeStruct((), x.dtype, layout=plgpu.Layout.WG_SPLAT(())),
    )

    @inline
    def number(ctx: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        signed = True if isinstance(x.mlir_dtype, ir.IntegerType) else None
        return mgpu.FragmentedArray.splat(element(x.registers.item(), 0), (), is_signed=signed)

    return number(x)
