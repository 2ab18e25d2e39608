"""A store of prompts that an engine has read, in the host's memory and on disk, so that prompts
that begin alike are not read again.

A prompt is read in chunks. The state after a chunk depends only on the tokens up to its end:
methods that take statistics from a prompt take them from its first chunk. So the store keeps one
piece per chunk, under a hash of all tokens up to its end. A row joined from the pieces of a chain
has the bits that reading the prompt would give.

    key(0) = fingerprints of model and parameters, and everything that shapes a row
    key(i) = sha256(key(i - 1), tokens of chunk i)
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import kvq_jax
from kvq_jax.cache.cache import Cache
from kvq_models.inference.engine.pieces import RowPiece
from kvq_models.inference.engine.prefix_folder import PrefixFolder

_log = logging.getLogger("kvq.prefixes")


class PrefixStore:
    """Pieces of prompts, in at most `limit` bytes of the host's memory. The least recently used go
    first, and a piece before those that it continues. Engines of any models may share a store in
    one thread.

    A piece whose bytes have changed in memory is dropped.

    folder: keeps the pieces on disk too; pieces that are only there are read back. reads: the
    number of pieces read back.
    """

    def __init__(self, limit: int, folder: PrefixFolder | None = None):
        if limit < 0:
            raise ValueError(f"{limit=} bytes must be at least 0")
        self.limit, self.folder = limit, folder
        self.nbytes = self.reads = 0
        # the least recently used first; a piece is never older than its continuations
        self._pieces: OrderedDict[bytes, tuple[RowPiece, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def longest(
        self, keys: Sequence[bytes], fits: Callable[[int, RowPiece], bool] = lambda *_: True
    ) -> list[RowPiece]:
        """Return the pieces of a chain of keys, as far as the store or its folder has them.

        fits(i, piece): True if a piece from disk is the one of chunk i. Others are deleted.
        """
        pieces = []
        for count, key in enumerate(keys, start=1):
            piece = self._intact(key) or self._read(keys[:count], fits)
            if piece is None:
                break
            pieces.append(piece)
        self._use(keys[: len(pieces)])
        if self.folder is not None:
            self.folder.use(keys[: len(pieces)])
        return pieces

    def put(self, keys: Sequence[bytes], piece: RowPiece) -> bool:
        """Store the piece of keys[-1], which continues the others. Return False if one of them is
        gone or memory has no room."""
        if self.folder is not None:
            self.folder.put(keys, piece)
        return self._keep(keys, piece)

    def _read(
        self, keys: Sequence[bytes], fits: Callable[[int, RowPiece], bool]
    ) -> RowPiece | None:
        piece = None if self.folder is None else self.folder.get(keys[-1])
        if self.folder is not None and piece is not None and not fits(len(keys) - 1, piece):
            self.folder.refuse(keys[-1], "it is no piece of this cache")
            return None
        if piece is not None:
            self.reads += 1
            self._keep(keys, piece)
        return piece

    def _keep(self, keys: Sequence[bytes], piece: RowPiece) -> bool:
        if not all(key in self._pieces for key in keys[:-1]):
            return False
        if keys[-1] not in self._pieces:
            if piece.nbytes + sum(self._pieces[key][0].nbytes for key in keys[:-1]) > self.limit:
                return False
            self._use(keys[:-1])
            while self.nbytes + piece.nbytes > self.limit:
                self._drop(next(iter(self._pieces)))
            self._pieces[keys[-1]] = piece, piece.crc32()
            self.nbytes += piece.nbytes
        self._use(keys)
        return True

    def _intact(self, key: bytes) -> RowPiece | None:
        piece, crc32 = self._pieces.get(key, (None, 0))
        if piece is not None and piece.crc32() != crc32:
            _log.error("memory of a prefix was damaged; it is not used")
            self._drop(key)
            return None
        return piece

    def _drop(self, key: bytes) -> None:
        self.nbytes -= self._pieces.pop(key)[0].nbytes

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._pieces:  # other pieces are only in the folder
                self._pieces.move_to_end(key)


def chunk_keys(scope: bytes, prompt: Sequence[int], chunk: int, owner: str = "") -> list[bytes]:
    """Return a key for each chunk of a prompt. scope: a digest of everything else that decides the
    bits of a row. owner: the prompts of another one have other keys."""
    keys, key = [], scope + owner.encode()
    for start in range(0, len(prompt), chunk):
        key = hashlib.sha256(
            key + np.asarray(prompt[start : start + chunk], "<u4").tobytes()
        ).digest()
        keys.append(key)
    return keys


def scope_of(row: Cache, model_fingerprint: str, *beside: Any) -> bytes:
    """Return a digest of everything that decides the bits of rows like `row`: the model (with its
    cache parameters), this device, these versions, and the further values in `beside`."""
    arrays = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(row)]
    computed = kvq_jax.__version__, jax.__version__, jax.devices()[0].device_kind
    facts = (
        model_fingerprint,
        str(row.spec),
        row.dims,
        row.capacity,
        row.dtype,
        arrays,
        *computed,
        *beside,
    )
    return hashlib.sha256(repr(facts).encode()).digest()
