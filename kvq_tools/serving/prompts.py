"""Encode prompts of clients in a separate thread, so that a long text or a slow template does not
block other clients."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvq_tools.chat_template import rendered
from kvq_tools.serving import errors

SECONDS = 10  # for one prompt; a template takes milliseconds, and a million characters a second

T = TypeVar("T")


class PromptEncoder:
    """Convert text to token ids. The tokenizer is copied: Hugging Face tokenizers change their
    state while they encode."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None):
        self._tokenizer = copy.deepcopy(tokenizer)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvq-prompts")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def of_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text with the tokenizer's special tokens. Raises ApiError."""

        def encode() -> tuple[int, ...]:
            return tuple(self._tokenizer(_checked(text), verbose=False).input_ids)

        return await self._within("prompt", encode)

    async def of_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Return the ids of a conversation up to the beginning of the next answer. Raises
        ApiError."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise errors.ApiError(
                400,
                "This model's tokenizer has no chat template. Use /v1/completions, or start the"
                " server with --chat-template FILE.",
                code="no_chat_template",
            )

        def encode() -> tuple[int, ...]:
            for message in messages:
                _checked(message["content"])
            text = rendered(self._tokenizer, messages)
            return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

        return await self._within("messages", encode)

    async def _within(self, name: str, encode: Callable[[], T]) -> T:
        done = asyncio.get_running_loop().run_in_executor(self._thread, encode)
        try:
            return await asyncio.wait_for(done, SECONDS)
        except TimeoutError:
            raise errors.invalid(
                name, f"it took longer than {SECONDS} s to turn it into tokens"
            ) from None
        except ValueError as error:
            raise errors.invalid(name, str(error)) from None


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half a surrogate pair, which is no Unicode text") from None
    return text
