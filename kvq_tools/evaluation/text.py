"""Tokenize a text, and count the UTF-8 bytes of each token."""

from __future__ import annotations

import importlib.resources
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class TokenizedText(NamedTuple):
    """The tokens of a text.

    ids: [n] int32. bytes: [n], UTF-8 bytes of each token, or None if the tokenizer gives no
    offsets.
    """

    ids: Int[np.ndarray, "n"]
    bytes: Int[np.ndarray, "n"] | None

    def first(self, tokens: int) -> TokenizedText:
        return TokenizedText(self.ids[:tokens], None if self.bytes is None else self.bytes[:tokens])


def passage() -> str:
    """Return the passage that ships with kvq, the text of commands that are given none."""
    file = importlib.resources.files("kvq_tools.cli") / "passage.txt"
    return file.read_text(encoding="utf-8")


def tokenize(tokenizer: Any, text: str) -> TokenizedText:
    """Tokenize a text. The tokens' bytes add up to the text's, up to the last token's end.

    A token ends where the tokenizer says and begins at the end of the token before. Text dropped
    between two tokens therefore counts for the second, a character of several tokens for the first,
    and special tokens have no bytes.
    """
    if not getattr(tokenizer, "is_fast", False):
        return TokenizedText(np.asarray(tokenizer(text, verbose=False).input_ids, np.int32), None)
    encoded = tokenizer(text, verbose=False, return_offsets_mapping=True)
    ends = np.maximum.accumulate(
        np.asarray([end for _, end in encoded.offset_mapping], np.int64), axis=0
    )
    characters = np.fromiter((len(c.encode()) for c in text), np.int64, len(text))
    before = np.concatenate([[0], np.cumsum(characters)])  # bytes before each character
    return TokenizedText(np.asarray(encoded.input_ids, np.int32), np.diff(before[ends], prepend=0))
