"""Prompts that an engine has read, kept in the host's memory, so that whoever begins alike does not read them again.

A prompt is read in chunks, and the state after a chunk depends on the tokens up to its end alone: methods that take statistics from a
prompt take them from its first chunk. So a piece is kept for each chunk, under a hash of all tokens up to its end, and a row that is put
together from the pieces of a chain has the bits that reading would have given it.

    key(0) = fingerprints of model and parameters, and everything that shapes a row        key(i) = sha256(key(i - 1), tokens of chunk i)

A piece holds what its chunk added to the quantized body, a copy of the windows and statistics as they were at its end, and the logits
after it. Bodies only grow: blocks are quantized once and stay as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvq_jax.cache.cache import Cache
from kvq_jax.types.array_types import ArraySpec


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a row that one chunk made. arrays: one for each leaf of the row, of a growing one the part from `starts` on.

    length: tokens of the prompt up to its end. logits [1, V]: after the last of them.
    """

    length: int
    starts: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]
    logits: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(array.nbytes for array in self.arrays)


class PrefixStore:
    """Pieces of prompts, in at most `limit` bytes of the host's memory. The least recently used go first, and a piece before those that it
    continues. Engines of any models may share one in a thread."""

    def __init__(self, limit: int):
        if limit < 0:
            raise ValueError(f"{limit=} bytes must be at least 0")
        self.limit, self.nbytes = limit, 0
        self._pieces: OrderedDict[bytes, Piece] = (
            OrderedDict()
        )  # the least recently used first; a piece is never older than what continues it

    def __len__(self) -> int:
        return len(self._pieces)

    def longest(self, keys: Sequence[bytes]) -> list[Piece]:
        """Return the pieces of a chain of keys, as far as they are here."""
        found = []
        for key in keys:
            piece = self._pieces.get(key)
            if piece is None:
                break
            found.append(piece)
        self._use(keys[: len(found)])
        return found

    def put(self, keys: Sequence[bytes], piece: Piece) -> bool:
        """Keep the piece of keys[-1], which continues the others. Return False where one of them is gone, or there is no room for it."""
        if not all(key in self._pieces for key in keys[:-1]):
            return False
        if keys[-1] not in self._pieces:
            chain = set(keys)
            while self.nbytes + piece.nbytes > self.limit:
                oldest = next(iter(self._pieces), None)
                if oldest is None or oldest in chain:
                    return False
                self.nbytes -= self._pieces.pop(oldest).nbytes
            self._pieces[keys[-1]] = piece
            self.nbytes += piece.nbytes
        self._use(keys)
        return True

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._pieces.move_to_end(key)


def chunk_keys(scope: bytes, prompt: Sequence[int], chunk: int) -> list[bytes]:
    """Return a key for each chunk of a prompt. scope: a digest of all else that decides the bits of a row."""
    keys, key = [], scope
    for start in range(0, len(prompt), chunk):
        key = hashlib.sha256(key + np.asarray(prompt[start : start + chunk], "<u4").tobytes()).digest()
        keys.append(key)
    return keys


def scope_of(row: Cache, model_fingerprint: str, *beside: Any) -> bytes:
    """Return a digest of what decides the bits of rows like `row`, of a model (with its cache parameters) and of what is named beside."""
    facts = (model_fingerprint, str(row.spec), row.dims, row.capacity, row.dtype, *beside)
    return hashlib.sha256(repr(facts).encode()).digest()


class RowPieces:
    """Cuts rows of one layout into pieces, and puts them together again. Everything happens on the host: nothing is compiled."""

    def __init__(self, row: Cache):
        self._axes = row.axes
        self._specs: list[ArraySpec] = jax.tree.leaves(self._axes)
        of_layers = [plan.regions for plan, layer in zip(row.plans, self._axes.layers, strict=True) for _ in jax.tree.leaves(layer)]
        self._regions = [*of_layers, None]  # the last leaf is the lengths
        self._empty = [_uniform(spec, np.asarray(leaf)) for spec, leaf in zip(self._specs, jax.tree.leaves(row), strict=True)]

    def cut(self, row: Cache, before: int, length: int, logits: jax.Array) -> Piece:
        """Return what a chunk added that began after `before` tokens and ended after `length`."""
        starts, arrays = [], []
        for (spec, start, end), leaf in zip(self._parts(before, length), jax.tree.leaves(row), strict=True):
            starts.append(start)
            arrays.append(np.array(np.asarray(leaf)[_along(spec, start, end)]))
        return Piece(length, tuple(starts), tuple(arrays), np.array(logits))

    def joined(self, pieces: Sequence[Piece]) -> Cache:
        """Return the row after the last of these pieces, which continue each other from the first chunk on."""
        leaves = []
        for i, (spec, empty) in enumerate(zip(self._specs, self._empty, strict=True)):
            if not spec.grows:
                leaves.append(pieces[-1].arrays[i])
                continue
            whole = np.array(empty)
            for piece in pieces:
                whole[_along(spec, piece.starts[i], piece.starts[i] + piece.arrays[i].shape[spec.axis("tokens")])] = piece.arrays[i]
            leaves.append(whole)
        return jax.tree.unflatten(jax.tree.structure(self._axes), jax.device_put(leaves))

    def _parts(self, before: int, length: int) -> Iterator[tuple[ArraySpec, int, int]]:
        for spec, regions in zip(self._specs, self._regions, strict=True):
            if regions is None or not spec.grows:
                yield spec, 0, 0
            else:
                axis = spec["tokens"]
                yield spec, regions.body(before) // axis.per * axis.each, -(-regions.body(length) // axis.per) * axis.each


def _along(spec: ArraySpec, start: int, end: int) -> tuple[slice, ...]:
    """Return the index of a part along the tokens of an array that grows, of everything in others."""
    return tuple(slice(start, end) if spec.grows and name == "tokens" else slice(None) for name in spec.names)


def _uniform(spec: ArraySpec, empty: np.ndarray) -> np.ndarray:
    """Return an array of an empty row as a view of little memory: before it holds tokens, a growing array is the same for all of them."""
    if not spec.grows:
        return np.zeros(0)  # every piece has all of it
    return np.broadcast_to(np.array(empty[_along(spec, 0, 1)]), empty.shape) if empty.size else empty
