"""The text of a saved prompt, from which a question goes on.

`kvq prefill` saves the text beside the cache. In a chat this is the rendered template up to the end
of the user's message, so that document and question are one message, and what a template writes
before it (such as today's date) stays as it was read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvq_tools import chat_template
from kvq_tools.cli import text_input
from kvq_tools.cli.console import UserError

PARAGRAPH = "\n\n"  # between the document and the question of a chat
_MARK = "kvqquestion"  # stands for a document while a template is rendered


@dataclasses.dataclass(frozen=True)
class Opening:
    """The text that was read, and whether it is in the tokenizer's chat template."""

    text: str
    chat: bool

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that `kvq.files.save` keeps beside a cache."""
        return {
            "text": np.frombuffer(self.text.encode(), np.uint8),
            "chat": np.array([self.chat], np.uint8),
        }

    def joined(self, tokenizer: Any, question: str) -> list[int]:
        """Return the tokens of the text with a question after it."""
        if not self.chat:
            return text_input.encode(tokenizer, self.text + question)
        text = self.text + _ending(tokenizer, PARAGRAPH + question)
        return chat_template.encoded(tokenizer, text)

    def in_chat(self, tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
        """Return the text of a conversation that goes on from here. In a chat the first message
        ends the message of the saved text, else the conversation follows the text."""
        if not self.chat:
            rendered = text_input.render_chat(tokenizer, list(messages))
            first = getattr(tokenizer, "bos_token", None) or ""  # the saved text begins with it
            return self.text + PARAGRAPH + rendered.removeprefix(first)
        marked = messages[0] | {"content": _MARK + PARAGRAPH + messages[0]["content"]}
        rendered = text_input.render_chat(tokenizer, [marked, *messages[1:]])
        return self.text + rendered.partition(_MARK)[2]

    def encoded(self, tokenizer: Any, text: str) -> list[int]:
        """Return the tokens of a text that begins with this one."""
        encode = chat_template.encoded if self.chat else text_input.encode
        return encode(tokenizer, text)


def opening(tokenizer: Any, text: str, *, chat: bool) -> Opening:
    """Return the opening that a prompt of this text gives."""
    if not chat:
        return Opening(text, chat)
    rendered = text_input.render_chat(tokenizer, [{"role": "user", "content": text}])
    return Opening(rendered.removesuffix(_ending(tokenizer, "")), chat)


def stored(arrays: Mapping[str, np.ndarray]) -> Opening | None:
    """Return the opening that `arrays` holds, or None if the prompt was given as token ids. Raises
    ValueError if it is damaged."""
    text, chat = arrays.get("text"), arrays.get("chat")
    if text is None or chat is None:
        return None
    if (text.dtype, text.ndim, chat.dtype, chat.shape) != (np.uint8, 1, np.uint8, (1,)):
        raise ValueError(f"the text beside the cache is {text.dtype}{list(text.shape)}")
    return Opening(text.tobytes().decode(), bool(chat[0]))


def continued(
    tokenizer: Any, saved: list[int], opening: Opening | None, question: str
) -> tuple[int, list[int]]:
    """Return (kept, tokens): the joined prompt, whose first `kept` tokens are those of `saved`.

    They differ from the saved prompt's end on if a chat's message ended there, or if the tokenizer
    joins the last characters of the text and the first ones of the question to one token.
    """
    if opening is None:
        return len(saved), saved + chat_template.encoded(tokenizer, question)
    tokens = opening.joined(tokenizer, question)
    kept = text_input.common_prefix(saved, tokens[:-1])
    if not kept:
        raise UserError("this tokenizer reads another token at the start of the saved text")
    return kept, tokens


def _ending(tokenizer: Any, text: str) -> str:
    """Return the rendered text after a document in a user's message that ends with `text`."""
    message = {"role": "user", "content": _MARK + text}
    return text_input.render_chat(tokenizer, [message]).partition(_MARK)[2]
