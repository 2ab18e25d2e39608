"""Cut rows of a cache into pieces, one per chunk of a prompt: the blocks that the chunk added to
the quantized body, a copy of the windows and statistics at its end, and the logits after it. Bodies
only grow: blocks are quantized once and do not change.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from kvq_jax.cache.cache import Cache
from kvq_jax.types.array_types import ArraySpec


@dataclasses.dataclass(frozen=True)
class RowPiece:
    """The part of a row that one chunk made.

    arrays: one for each leaf of the row; of a growing leaf, the part from `starts` on. length:
    tokens of the prompt up to the chunk's end. logits [1, V]: after the last of them.
    """

    length: int
    starts: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]
    logits: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(array.nbytes for array in self.arrays)

    def crc32(self) -> int:
        digest = zlib.crc32(repr((self.length, self.starts)).encode())
        for array in (*self.arrays, self.logits):
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            digest = zlib.crc32(content.data, digest)
        return digest


class RowPieces:
    """Cuts rows of one layout into pieces and joins them again, on the host. Nothing is
    compiled."""

    def __init__(self, row: Cache, vocabulary: int):
        self._axes = row.axes
        self._specs: list[ArraySpec] = jax.tree.leaves(self._axes)
        of_layers = [
            plan.regions
            for plan, layer in zip(row.plans, self._axes.layers, strict=True)
            for _ in jax.tree.leaves(layer)
        ]
        self._regions = [*of_layers, None]  # the last leaf is the lengths
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(row)]
        self._logits = ((1, vocabulary), np.dtype(np.float32))
        self._empty = [
            _uniform(spec, np.asarray(leaf))
            for spec, leaf in zip(self._specs, jax.tree.leaves(row), strict=True)
        ]

    def cut(self, row: Cache, before: int, length: int, logits: jax.Array) -> RowPiece:
        """Return the piece of a chunk that began after `before` tokens and ended after `length`."""
        starts, arrays = [], []
        for (spec, start, end), leaf in zip(
            self._parts(before, length), jax.tree.leaves(row), strict=True
        ):
            starts.append(start)
            arrays.append(np.array(np.asarray(leaf)[_along(spec, start, end)]))
        return RowPiece(length, tuple(starts), tuple(arrays), np.array(logits))

    def joined(self, pieces: Sequence[RowPiece]) -> Cache:
        """Return the row at the end of these pieces, which continue each other from the first chunk
        on."""
        leaves = []
        for i, (spec, empty) in enumerate(zip(self._specs, self._empty, strict=True)):
            if not spec.grows:
                leaves.append(pieces[-1].arrays[i])
                continue
            whole = np.array(empty)
            for piece in pieces:
                part, start = piece.arrays[i], piece.starts[i]
                whole[_along(spec, start, start + part.shape[spec.axis("tokens")])] = part
            leaves.append(whole)
        return jax.tree.unflatten(jax.tree.structure(self._axes), jax.device_put(leaves))

    def fits(self, piece: RowPiece, before: int, length: int) -> bool:
        """Return True if a piece has the arrays of a chunk from `before` to `length` tokens."""
        expected, starts = [], []
        for (spec, start, end), (shape, dtype) in zip(
            self._parts(before, length), self._leaves, strict=True
        ):
            slices = _along(spec, start, end)
            part = (
                len(range(*section.indices(size)))
                for section, size in zip(slices, shape, strict=True)
            )
            expected.append((tuple(part), dtype))
            starts.append(start)
        arrays = [(array.shape, array.dtype) for array in piece.arrays]
        logits = piece.logits.shape, piece.logits.dtype
        same_place = (piece.length, piece.starts) == (length, tuple(starts))
        return same_place and (arrays, logits) == (expected, self._logits)

    def _parts(self, before: int, length: int) -> Iterator[tuple[ArraySpec, int, int]]:
        for spec, regions in zip(self._specs, self._regions, strict=True):
            if regions is None or not spec.grows:
                yield spec, 0, 0
            else:
                axis = spec["tokens"]
                yield (
                    spec,
                    regions.aged_tokens(before) // axis.per * axis.each,
                    -(-regions.aged_tokens(length) // axis.per) * axis.each,
                )


def _along(spec: ArraySpec, start: int, end: int) -> tuple[slice, ...]:
    """Return the index of a part along the tokens of a growing array, or of a whole other array."""
    return tuple(
        slice(start, end) if spec.grows and name == "tokens" else slice(None) for name in spec.names
    )


def _uniform(spec: ArraySpec, empty: np.ndarray) -> np.ndarray:
    """Return an array of an empty row as a view that takes little memory: an empty growing array is
    the same at every token."""
    if not spec.grows:
        return np.zeros(0)  # every piece has all of it
    return (
        np.broadcast_to(np.array(empty[_along(spec, 0, 1)]), empty.shape) if empty.size else empty
    )
