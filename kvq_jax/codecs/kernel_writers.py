"""Writers for the blocks that codecs store, as `pallas_kernels.quantize.writer` defines them: what
quantizes a block in a kernel.

Each writer is imported where it is made: its kernels need `jax.experimental.pallas.triton`, which
is deprecated, and all that runs on XLA works without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.polar_array import PolarFormat
from pallas_kernels.quantize.writer import BlockWriter


class KernelWriter(NamedTuple):
    """What quantizes blocks of other formats, in the kernel that appends a token: a `BlockWriter`
    (pallas_kernels/quantize/writer.py), and the arrays that it reads beside the rows, [B, K, ...],
    where an axis may be 1 long."""

    blocks: BlockWriter
    inputs: list[Array]


def polar(format: PolarFormat) -> KernelWriter:
    """Return the writer of keys in polar form, in groups of tokens with linear radii."""
    from pallas_kernels.quantize.polar import PolarBlocks

    return KernelWriter(
        PolarBlocks(
            format.layout,
            format.angle_bits,
            format.group_size,
            format.cut == "gap",
            format.scale_dtype,
        ),
        [],
    )


def table(
    format: CodebookFormat,
    levels: Float[Array, " entries"],
    values: Float[Array, " entries"],
    *,
    of_channels: Sequence[Float[Array, "K H"]] = (),
    thresholds: Sequence[Float[Array, "..."]] = (),
    per_side: int = 0,
) -> KernelWriter:
    """Return the writer of codes that index a table: the nearest of `levels`, read as the same of
    `values`.

    of_channels: scale and zero point of channels, where the format stores none. thresholds: below
    and above which entries are outliers, of channels [K, H] or of all [], where the format has
    slots; none where a token has `per_side` outliers on each side.
    """
    from pallas_kernels.quantize.outlier_slots import Slots
    from pallas_kernels.quantize.table import TableBlocks

    group, pool = format.group, format.pool
    slots = None if pool is None else Slots(pool.tokens, pool.slots, pool.overflows)
    given = [
        *of_channels,
        *(bound.reshape(1, 1) if bound.ndim == 0 else bound for bound in thresholds if pool),
    ]
    writer = TableBlocks(
        format.layout,
        group.channels if group else None,
        group.heads if group else 1,
        scale_dtype=format.scale_dtype,
        slots=slots,
        per_side=0 if thresholds else per_side,
    )
    return KernelWriter(
        writer, [array.astype(jnp.float32)[None] for array in (levels[None], values[None], *given)]
    )
