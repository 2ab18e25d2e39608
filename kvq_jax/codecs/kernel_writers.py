"""Writers for the blocks that codecs store, as `pallas_kernels.quantize.writer` defines them: what quantizes a block in a kernel.

Each writer is imported where it is made: its kernels need `jax.experimental.pallas.triton`, which is deprecated, and all that runs on XLA
works without it.
"""

from __future__ import annotations

from kvq_jax.arrays.polar_array import PolarFormat
from kvq_jax.codecs.base import KernelWriter


def polar(format: PolarFormat) -> KernelWriter:
    """Return the writer of keys in polar form, in groups of tokens with linear radii."""
    from pallas_kernels.quantize.polar import PolarBlocks

    return KernelWriter(PolarBlocks(format.layout, format.angle_bits, format.group_size, format.cut == "gap", format.scale_dtype), [])
