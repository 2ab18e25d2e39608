"""The text of generated tokens as they come, and where it stops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character
CONTEXT = (
    6  # tokens before a text, beside which it is decoded: some tokenizers drop a space at the start
)


class GrowingText:
    """The text after a prompt, token by token. Each token is decoded beside a few before it, so
    that it costs the same however long the text is.

    The pieces that `add` returns, and that of `rest`, are together what the tokens decode to after
    the prompt.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._held = list(
            prompt[-CONTEXT:]
        )  # the context, then the tokens whose text is not whole yet
        self._context = len(self._held)

    def add(self, token: int) -> str:
        """Return the new text; "" if a character waits for its end."""
        self._held.append(token)
        new = self._new()
        if new.endswith(UNFINISHED):
            return ""
        if new:
            self._held, self._context = self._held[self._context :], len(self._held) - self._context
        return new

    def rest(self) -> str:
        """Return the text of an unfinished character, with which the text ends."""
        return self._new()

    def _new(self) -> str:
        before, whole = self._decode(self._held[: self._context]), self._decode(self._held)
        return (
            whole[len(before) :]
            if whole.startswith(before)
            else self._decode(self._held[self._context :])
        )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def token_text(tokenizer: Any, token: int) -> str:
    """Return a token's own text, that of special tokens too."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclasses.dataclass
class Stops:
    """Texts that end an answer and are no part of it. Text that may be the beginning of one is held
    back."""

    stops: tuple[str, ...]
    _held: str = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return (the text that is certain now, whether a stop was found right after it)."""
        self._held += text
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        keep = max(
            (
                n
                for stop in self.stops
                for n in range(1, len(stop))
                if self._held.endswith(stop[:n])
            ),
            default=0,
        )
        certain, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return certain, False

    def rest(self) -> str:
        """Return what was held back, where no more text comes."""
        held, self._held = self._held, ""
        return held
