"""Turn generated tokens into text as they come.

A token may hold part of a character, and some tokenizers drop a space at the start of a text. So
the whole text is decoded with its prompt, and a text that grows shows only what later tokens cannot
change.
"""

from __future__ import annotations

from typing import Any

from kvq_tools.cli.console import printable
from kvq_tools.growing_text import UNFINISHED, GrowingText, decoded


class Continuation:
    """The text after a prompt, or the token ids separated by spaces if there is no tokenizer.

    If the last token is one of `end_ids`, it is left out: it only ends the text, and not every
    tokenizer counts it as special.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], end_ids: tuple[int, ...] = ()):
        self._tokenizer, self._prompt, self._end_ids = tokenizer, prompt, end_ids
        self._before = "" if tokenizer is None else decoded(tokenizer, prompt)
        self._growing = None if tokenizer is None else GrowingText(tokenizer, prompt)
        self._pushed = 0  # tokens whose text was shown or waits

    def text(self, ids: list[int]) -> str:
        """Return the text of the tokens `ids` after the prompt."""
        ids = self._without_end(ids)
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        whole = decoded(self._tokenizer, [*self._prompt, *ids])
        # the tokens may complete a character that the prompt begins
        for before in (self._before, self._before.rstrip(UNFINISHED)):
            if whole.startswith(before):
                return whole.removeprefix(before)
        return decoded(self._tokenizer, ids)

    def push(self, ids: list[int], *, last: bool = False) -> str:
        """Return the new text that later tokens cannot change. `ids` are all tokens so far. An
        incomplete character waits for its end."""
        ids = self._without_end(ids)
        tokens, self._pushed = ids[self._pushed :], max(self._pushed, len(ids))
        if self._growing is None:
            space = " " if tokens and len(tokens) < len(ids) else ""
            return space + " ".join(map(str, tokens))
        new = "".join(map(self._growing.add, tokens))
        return printable(new + self._growing.rest() if last else new)

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self._end_ids else ids
