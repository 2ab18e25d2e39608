"""The texts and bytes of tokens, and stop texts."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvq_tools.growing_text import UNFINISHED, decoded

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token, special tokens included."""
    return decoded(tokenizer, [token], special=True)


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


class TokenTexts:
    """The texts and bytes of a tokenizer's tokens. Each token is decoded once: an answer may report
    twenty for each of its own."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._tokenizer, token)
        return self._texts[token]

    def bytes(self, token: int) -> list[int] | None:
        if token not in self._bytes:
            encoded = token_bytes(self._tokenizer, token)
            self._bytes[token] = None if encoded is None else list(encoded)
        return self._bytes[token]


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
