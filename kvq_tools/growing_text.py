"""Decode generated tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # a decoder's output for incomplete characters
CONTEXT = 6  # tokens decoded before a text, because some tokenizers drop a space at the start
MAX_UNFINISHED = 3  # bytes of an incomplete character
MAX_WINDOW_TOKENS = 64  # only byte sequences that are not text come near it


def decoded(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of tokens as it is, without special tokens unless they are asked for."""
    return tokenizer.decode(
        ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )


def text_by_token(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token completes. Together they are the text of all tokens."""
    text = GrowingText(tokenizer, ())
    parts = [text.add(token) for token in ids]
    return (*parts[:-1], parts[-1] + text.rest())


class GrowingText:
    """The text after a prompt, token by token. Each token is decoded with a few before it, so that
    the cost of a token does not grow with the text.

    The pieces from `add` and `rest` together are the decoded text of the tokens after the prompt,
    with the whole of a character that the prompt begins and they end.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        size = CONTEXT
        text = decoded(tokenizer, prompt[-size:])
        while text.startswith(UNFINISHED) and size < min(len(prompt), MAX_WINDOW_TOKENS):
            size += 1  # the window begins inside a character
            text = decoded(tokenizer, prompt[-size:])
        self._window = list(prompt[-size:])  # the newest tokens that have a text
        self._sent = len(text)  # characters of their text
        self._begun = len(text) - len(text.rstrip(UNFINISHED))  # of these, the ones that may change

    def add(self, token: int) -> str:
        """Return the new text, or "" if a character is incomplete."""
        text = decoded(self._tokenizer, [*self._window, token])
        if len(text) == self._sent and not decoded(self._tokenizer, [token]):
            return ""  # a special token; the window keeps the tokens before it
        self._window.append(token)
        if self._begun and not text[: self._sent].endswith(UNFINISHED):
            self._sent -= self._begun
        kept = text[-MAX_UNFINISHED:].rstrip(UNFINISHED)
        end = max(self._sent, len(text) - len(text[-MAX_UNFINISHED:]) + len(kept))
        new, self._sent = text[self._sent : end], end
        self._begun = 0 if new else self._begun
        self._shorten(text[end:])
        return new

    def rest(self) -> str:
        """Return the text of an unfinished character at the end."""
        return decoded(self._tokenizer, self._window)[self._sent :]

    def _shorten(self, unsent: str) -> None:
        """Drop old tokens if the others have the same unsent text."""
        if self._begun or len(self._window) < 2 * CONTEXT:
            return
        newest = self._window[-CONTEXT:]
        text = decoded(self._tokenizer, newest)
        if text.endswith(unsent) or len(self._window) > MAX_WINDOW_TOKENS:
            self._window, self._sent = newest, max(0, len(text) - len(unsent))
