"""Describe the formats of codecs to the kernels that quantize blocks
(`pallas_kernels.quantize.writer`). Writers are imported inside functions, as readers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.polar_array import PolarFormat
from pallas_kernels.quantize.writer import BlockWriter


class KernelWriter(NamedTuple):
    """The quantization of blocks of other formats, in the kernel that appends a token.

    blocks: the `BlockWriter` (pallas_kernels/quantize/writer.py).
    inputs: the arrays that it reads besides the rows, [B, K, ...]. An axis may be 1 long.
    """

    blocks: BlockWriter
    inputs: list[Array]


def polar(format: PolarFormat) -> KernelWriter:
    """Return the writer of keys in polar form, in groups of tokens with linear radii."""
    from pallas_kernels.quantize.polar import PolarBlocks

    writer = PolarBlocks(
        format.layout, format.angle_bits, format.group_size, format.cut == "gap", format.scale_dtype
    )
    return KernelWriter(writer, [])


def table(
    format: CodebookFormat,
    levels: Float[Array, " entries"],
    values: Float[Array, " entries"],
    *,
    of_channels: Sequence[Float[Array, "K H"]] = (),
    thresholds: Sequence[Float[Array, "..."]] = (),
    per_side: int = 0,
) -> KernelWriter:
    """Return the writer of codes that index a table.

    Args:
        format: the quantization format.
        levels: the codebook in which the nearest entry is looked up.
        values: the codebook that codes are read with, entry by entry the same as `levels`.
        of_channels: scale and zero point of channels, if the format stores none.
        thresholds: below and above which entries are outliers, [K, H] for channels or [] for all of
            them, if the format has slots. Empty if a token has `per_side` outliers on each side.
        per_side: outliers of a token on each side, without thresholds.
    """
    from pallas_kernels.quantize.outlier_slots import Slots
    from pallas_kernels.quantize.table import TableBlocks

    group, pool = format.group, format.pool
    slots = None if pool is None else Slots(pool.tokens, pool.slots, pool.overflows)
    bounds = [bound.reshape(1, 1) if bound.ndim == 0 else bound for bound in thresholds if pool]
    writer = TableBlocks(
        format.layout,
        group.channels if group else None,
        group.heads if group else 1,
        scale_dtype=format.scale_dtype,
        slots=slots,
        per_side=0 if thresholds else per_side,
    )
    inputs = [levels[None], values[None], *of_channels, *bounds]
    return KernelWriter(writer, [array.astype(jnp.float32)[None] for array in inputs])
