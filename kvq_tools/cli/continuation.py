"""Turn generated tokens into text as they come.

A token may hold part of a character, and some tokenizers drop a space at the start of a text. So
all tokens so far are decoded, including the prompt, and only text that later tokens cannot change
is shown.
"""

from __future__ import annotations

from typing import Any

from kvq_tools.cli.console import printable

UNFINISHED = "\ufffd"  # a decoder's output for an incomplete character


class Continuation:
    """The text after a prompt, or the token ids separated by spaces if there is no tokenizer.

    If the last token is one of `end_ids`, it is left out: it only ends the text, and not every
    tokenizer counts it as special.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], end_ids: tuple[int, ...] = ()):
        self._tokenizer, self._prompt, self._end_ids, self._shown = tokenizer, prompt, end_ids, 0
        self._before = "" if tokenizer is None else self._decode(prompt)

    def text(self, ids: list[int]) -> str:
        """Return the text of the tokens `ids` after the prompt."""
        ids = ids[:-1] if ids and ids[-1] in self._end_ids else ids
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        whole = self._decode([*self._prompt, *ids])
        return (
            whole.removeprefix(self._before)
            if whole.startswith(self._before)
            else self._decode(ids)
        )

    def push(self, ids: list[int], *, last: bool = False) -> str:
        """Return the new text that later tokens cannot change. `ids` are all tokens so far. An
        incomplete character waits for its end."""
        text = self.text(ids)
        stable = text if last else text.rstrip(UNFINISHED)
        new, self._shown = stable[self._shown :], max(self._shown, len(stable))
        return printable(new)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
