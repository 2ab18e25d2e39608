"""Decode generated tokens as they come, and find stop texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

UNFINISHED = "\ufffd"  # a decoder's output for incomplete characters
CONTEXT = 6  # tokens decoded before a text, because some tokenizers drop a space at the start
MOST_UNFINISHED = 3  # bytes of an incomplete character
LONGEST_WINDOW = 64  # tokens; only byte sequences that are no text come near it

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


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


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token, special tokens included."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Return the bytes of a token in UTF-8, which may be part of a character. None if the tokenizer
    does not tell them."""
    text = token_text(tokenizer, token)
    if UNFINISHED not in text:
        return text.encode()
    name = tokenizer.convert_ids_to_tokens(token)
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else None


@dataclasses.dataclass
class Stops:
    """Texts that end an answer and are not part of it. Text that may be the beginning of one is
    held back."""

    stops: tuple[str, ...]
    _withheld: str = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return (the text that is final now, True if a stop text follows it)."""
        text = self._withheld + text
        places = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if places:
            return text[: min(places)], True
        longest = max(map(len, self.stops), default=0)
        end = next(
            (
                at
                for at in range(max(0, len(text) - longest + 1), len(text))
                if any(stop.startswith(text[at:]) for stop in self.stops)
            ),
            len(text),
        )
        self._withheld = text[end:]
        return text[:end], False

    def rest(self) -> str:
        """Return the text that was held back, at the end of an answer."""
        withheld, self._withheld = self._withheld, ""
        return withheld
