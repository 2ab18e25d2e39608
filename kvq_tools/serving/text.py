"""Decode generated tokens as they come, and find stop texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # a decoder's output for incomplete characters
CONTEXT = 6  # tokens decoded before a text, because some tokenizers drop a space at the start


class GrowingText:
    """The text after a prompt, token by token. Each token is decoded with a few before it, so that
    the cost does not grow with the text.

    The pieces from `add` and `rest` together are the decoded text of the tokens after the prompt.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        # the context, then tokens whose text is incomplete
        self._recent = list(prompt[-CONTEXT:])
        self._context = len(self._recent)

    def add(self, token: int) -> str:
        """Return the new text, or "" if a character is incomplete."""
        self._recent.append(token)
        new = self._new()
        if new.endswith(UNFINISHED):
            return ""
        if new:
            self._recent = self._recent[self._context :]
            self._context = len(self._recent)
        return new

    def rest(self) -> str:
        """Return the text of an unfinished character at the end."""
        return self._new()

    def _new(self) -> str:
        before, whole = self._decode(self._recent[: self._context]), self._decode(self._recent)
        return (
            whole[len(before) :]
            if whole.startswith(before)
            else self._decode(self._recent[self._context :])
        )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token, special tokens included."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclasses.dataclass
class Stops:
    """Texts that end an answer and are not part of it. Text that may be the beginning of one is
    held back."""

    stops: tuple[str, ...]
    _withheld: str = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return (the text that is final now, True if a stop text follows it)."""
        self._withheld += text
        places = [at for stop in self.stops if (at := self._withheld.find(stop)) >= 0]
        if places:
            return self._withheld[: min(places)], True
        keep = max(
            (
                n
                for stop in self.stops
                for n in range(1, len(stop))
                if self._withheld.endswith(stop[:n])
            ),
            default=0,
        )
        certain, self._withheld = (
            self._withheld[: len(self._withheld) - keep],
            self._withheld[len(self._withheld) - keep :],
        )
        return certain, False

    def rest(self) -> str:
        """Return the text that was held back, at the end of an answer."""
        withheld, self._withheld = self._withheld, ""
        return withheld
