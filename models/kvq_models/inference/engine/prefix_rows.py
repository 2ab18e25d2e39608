"""The prompts of an engine in its store of prefixes: looked up before they are read, and kept after
every chunk."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.serialization import fingerprint
from kvq_models.inference.engine.pieces import RowPiece, RowPieces
from kvq_models.inference.engine.prefixes import PrefixStore, chunk_keys, scope_of
from kvq_models.inference.engine.requests import Request
from kvq_models.llama.model import Llama


class StoredPrompt(NamedTuple):
    """A prompt in a store: the keys of all its chunks, the number of its tokens that are stored,
    the logits after them (None if there are none), and a row with them."""

    keys: list[bytes]
    length: int
    logits: jax.Array | None
    row: Cache


class PrefixRows:
    """Rows like `row`, an empty one, of a model whose prompts are read in chunks of the largest of
    `widths`."""

    def __init__(
        self,
        store: PrefixStore,
        row: Cache,
        llama: Llama,
        widths: tuple[int, ...],
        implementation: Implementation,
    ):
        self._store, self._chunk = store, widths[-1]
        self._pieces = RowPieces(row, llama.config.vocab_size)
        layout = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), row)
        self._facts = layout, llama, widths, implementation

    @functools.cached_property
    def scope(self) -> bytes:
        """Return what tells rows of this model and engine from others in the store. It reads all
        weights, so it is computed after the server listens."""
        row, llama, widths, implementation = self._facts
        return scope_of(row, fingerprint(llama), widths, implementation)

    def recall(self, request: Request, row: Cache) -> StoredPrompt:
        """Return what the store has of a prompt. The empty row is consumed if it has anything."""
        length = len(request.prompt)

        def fits(count: int, piece: RowPiece) -> bool:
            before = count * self._chunk
            return self._pieces.fits(piece, before, min(before + self._chunk, length))

        keys = chunk_keys(self.scope, request.prompt, self._chunk, request.owner)
        pieces = self._store.longest(keys, fits)
        if not pieces:
            return StoredPrompt(keys, 0, None, row)
        for leaf in jax.tree.leaves(row):
            leaf.delete()  # there is never a third row
        logits = jax.device_put(pieces[-1].logits)
        return StoredPrompt(keys, pieces[-1].length, logits, self._pieces.joined(pieces))

    def keep(
        self, keys: list[bytes], row: Cache, before: int, length: int, logits: jax.Array
    ) -> None:
        """Store the chunk from `before` to `length` tokens."""
        chain = keys[: before // self._chunk + 1]
        self._store.put(chain, self._pieces.cut(row, before, length, logits))
