"""Keys before RoPE in an eigenbasis (readers/eigen_keys.py), as warps read them.

Codes of all stored channels of a slot's 16 tokens meet A^-1, which a block copies to shared memory
once for each head. The product makes rows of 16 channels at a time, which are rotated as keys in
runs are (runs.py). Registers hold the codes of two slots at head dim 128.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.matrices import Matrices, splat
from pallas_kernels.mosaic.registers import ROWS, SIDE, WARPS
from pallas_kernels.mosaic.run_words import SLOTS, apart, load_table
from pallas_kernels.mosaic.runs import RunsKeys
from pallas_kernels.mosaic.stripes import Stripe
from pallas_kernels.readers.eigen_keys import EigenKeys as EigenKeysReader
from pallas_kernels.readers.run_chunks import WIDTH


@dataclasses.dataclass(frozen=True)
class EigenKeys(RunsKeys):
    """Scores of a stripe of keys in an eigenbasis."""

    reader: EigenKeysReader

    @property
    def together(self) -> int:
        return SLOTS if self.reader.channels == 64 else 2

    def fixed(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return what keys in runs meet, and the transpose of `EigenKeysReader.matrix` in matrices
        [K, H / WIDTH, C / SIDE, WIDTH, SIDE]."""
        matrix = jnp.swapaxes(self.reader.matrix(stored), 1, 2)
        heads, channels, summed = matrix.shape
        cut = matrix.reshape(heads, channels // WIDTH, WIDTH, summed // SIDE, SIDE)
        return [*super().fixed(stored), jnp.swapaxes(cut, 2, 3)]

    def _rows(
        self, buffers: Sequence[Any], stripe: Stripe, slots: range, ops: Matrices
    ) -> Callable[[int], list[jax.Array]]:
        pieces, matrix = range(len(self.reader.pieces)), buffers[-1]
        numbers = [self._numbers(buffers, stripe, piece, slots, ops) for piece in pieces]

        def rows(chunk: int) -> list[jax.Array]:
            """Return (k - mu) / g of a chunk of channels for each of the slots, in fp16."""
            none = apart(splat((WARPS, ROWS, WIDTH), 0.0), ops.interpret)
            sums = [none] * len(slots)
            for piece, of_slots in enumerate(numbers):
                part = load_table(matrix.at[chunk, pl.ds(2 * piece, 2)], ops.interpret)
                sums = [
                    ops.product(total, of_slot, part)
                    for total, of_slot in zip(sums, of_slots, strict=True)
                ]
            return [total.astype(jnp.float16) for total in sums]

        return rows
