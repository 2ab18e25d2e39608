"""Asynchronous copies to shared memory: by the copy engine, by all threads of a block, or by some
of them, 16 bytes each, if there are too few bytes for all."""

# pyright: reportArgumentType=false, reportCallIssue=false
# The stubs of MLIR do not say how many results inline assembly has, and those of Pallas give every
# copy a barrier.

from __future__ import annotations

import math
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.mosaic.registers import WARPS

_BYTES = 16  # of a thread


def copy(source: Any, target: Any, barrier: Any) -> None:
    """Begin a copy to shared memory, by the copy engine if there is a barrier."""
    if barrier is None and _is_small(target):
        _copy_few(source, target)
    elif barrier is None:
        inside = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(source, target, oob_mode=inside)
    else:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def _is_small(target: Any) -> bool:
    """Return True if Pallas' own copy has less than four bytes for each thread."""
    return math.prod(target.shape) * target.dtype.itemsize < 4 * 32 * WARPS


def _copy_few(source: Any, target: Any) -> None:
    """Begin a copy of neighbouring numbers from global to shared memory, a group of its own."""
    pieces, rest = divmod(math.prod(target.shape) * target.dtype.itemsize, _BYTES)
    assert rest == 0, "whole pieces"
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)

    @inline
    def begin(ctx: Any, source: ir.Value, target: ir.Value) -> None:
        i32, byte = (ir.IntegerType.get_signless(bits) for bits in (32, 8))
        utils.warpgroup_barrier()  # until all have read what is overwritten
        thread = utils.thread_idx()
        copies = arith.cmpi(arith.CmpIPredicate.ult, thread, utils.c(pieces, i32))
        with utils.when(copies):
            offset = arith.muli(thread, utils.c(_BYTES, i32))
            to, of = (
                utils.getelementptr(utils.memref_ptr(ref), [offset], byte)
                for ref in (target, source)
            )
            of = llvm.addrspacecast(llvm.PointerType.get(address_space=1), of)
            nvvm.cp_async_shared_global(to, of, _BYTES, nvvm.LoadCacheModifierKind.CG)
        nvvm.cp_async_commit_group()

    begin(source, target)
