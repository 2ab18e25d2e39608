"""Decode generated tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # a decoder's output for incomplete characters
CONTEXT = 6  # tokens decoded before a text, because some tokenizers drop a space at the start
MOST_UNFINISHED = 3  # bytes of an incomplete character
LONGEST_WINDOW = 64  # tokens; only byte sequences that are no text come near it


class GrowingText:
    """The text after a prompt, token by token. Each token is decoded with a few before it, so that
    the cost of a token does not grow with the text.

    The pieces from `add` and `rest` together are the decoded text of the tokens after the prompt.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT:])  # the newest tokens that have a text
        self._sent = len(self._decode(self._window))  # characters of their text

    def add(self, token: int) -> str:
        """Return the new text, or "" if a character is incomplete."""
        text = self._decode([*self._window, token])
        if len(text) == self._sent and not self._decode([token]):
            return ""  # a special token; the window keeps the tokens before it
        self._window.append(token)
        kept = text[-MOST_UNFINISHED:].rstrip(UNFINISHED)
        end = max(self._sent, len(text) - len(text[-MOST_UNFINISHED:]) + len(kept))
        new, self._sent = text[self._sent : end], end
        self._shorten(text[end:])
        return new

    def rest(self) -> str:
        """Return the text of an unfinished character at the end."""
        return self._decode(self._window)[self._sent :]

    def _shorten(self, unsent: str) -> None:
        """Drop old tokens if the others have the same unsent text."""
        if len(self._window) < 2 * CONTEXT:
            return
        newest = self._window[-CONTEXT:]
        text = self._decode(newest)
        if text.endswith(unsent) or len(self._window) > LONGEST_WINDOW:
            self._window, self._sent = newest, max(0, len(text) - len(unsent))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
