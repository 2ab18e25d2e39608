"""The prompts of an engine in its store of prefixes: looked up before they are read, and kept after
every chunk."""

from __future__ import annotations

import jax

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.serialization import fingerprint
from kvq_models.inference.engine.pieces import RowPiece, RowPieces
from kvq_models.inference.engine.prefixes import PrefixStore, chunk_keys, scope_of
from kvq_models.inference.engine.requests import Request
from kvq_models.llama.model import Llama


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
        self._scope = scope_of(row, fingerprint(llama), widths, implementation)

    def find(self, request: Request) -> tuple[list[bytes], list[RowPiece]]:
        """Return the keys of a prompt's chunks, and the pieces of its beginning."""
        length = len(request.prompt)

        def fits(count: int, piece: RowPiece) -> bool:
            before = count * self._chunk
            return self._pieces.fits(piece, before, min(before + self._chunk, length))

        keys = chunk_keys(self._scope, request.prompt, self._chunk, request.owner)
        return keys, self._store.longest(keys, fits)

    def joined(self, pieces: list[RowPiece]) -> Cache:
        return self._pieces.joined(pieces)

    def keep(
        self, keys: list[bytes], row: Cache, before: int, length: int, logits: jax.Array
    ) -> None:
        """Store the chunk from `before` to `length` tokens."""
        chain = keys[: before // self._chunk + 1]
        self._store.put(chain, self._pieces.cut(row, before, length, logits))
