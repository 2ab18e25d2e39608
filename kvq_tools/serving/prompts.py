"""Turn prompts of clients into tokens beside the event loop. What cannot fit is refused by its
length first, and nobody with a short prompt waits for long ones."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvq_tools import chat_template as templates
from kvq_tools.growing_text import decoded, text_by_token
from kvq_tools.serving import errors
from kvq_tools.template_process import SECONDS, TemplateProcess

SHORT = 1 << 15  # characters, which take some 30 ms
SHORT_TOKENS = 1 << 10  # which take some 30 ms to decode one by one
MAX_WAITING, WAIT_SECONDS = 64, 30  # prompts that wait for a thread, and how long
MAX_NAMES_LENGTH, MAX_NAMES_VALUES, MAX_NAMES_DEPTH = 1 << 16, 1000, 32
RESERVED = {  # arguments of transformers' renderer and Jinja's; others are names for the template
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "self",
    "tools",
}

T = TypeVar("T")


class _Lane:
    """A thread for one kind of work. Those who wait for it get a 429 after a while, and `seconds`
    count from the beginning of the work."""

    def __init__(self, seconds: float = SECONDS):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvq-prompts")
        self._free, self._waiting, self._seconds = asyncio.Semaphore(1), 0, seconds

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, name: str, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises ApiError, which names the field."""
        if self._waiting >= MAX_WAITING:
            raise errors.busy("many prompts wait to be turned into tokens")
        self._waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), WAIT_SECONDS)
        except TimeoutError:
            raise errors.busy("it is turning long prompts into tokens") from None
        finally:
            self._waiting -= 1
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(self._end)
        try:
            return await asyncio.wait_for(asyncio.shield(done), self._seconds)
        except TimeoutError:
            message = f"it took longer than {self._seconds:g} s to turn it into tokens"
            raise errors.invalid(name, message) from None
        except ValueError as error:
            raise errors.invalid(name, str(error)) from None

    def _end(self, done: asyncio.Future[Any]) -> None:
        self._free.release()
        if not done.cancelled():
            done.exception()  # also of work that nobody waits for any more


class PromptEncoder:
    """Convert text to token ids. The tokenizer is copied for each thread: Hugging Face tokenizers
    change their state while they encode.

    Args:
        chat_template: in place of the tokenizer's.
        capacity: tokens of the longest prompt.
        trusted: messages may spell special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        capacity: int,
        trusted: bool = False,
    ):
        try:
            self._template = chat_template or tokenizer.get_chat_template()
        except ValueError:  # none, or several without a default
            self._template = None
        self._names = templates.special_names(tokenizer)
        self._tokenizer, self._capacity, self._trusted = tokenizer, capacity, trusted
        # no token has more characters, so a longer text has more tokens than fit
        self._longest = capacity * max(map(len, tokenizer.get_vocab()))
        self._lanes = {short: (_Lane(), copy.deepcopy(tokenizer)) for short in (True, False)}
        self._templates, self._rendering = TemplateProcess(), _Lane(2 * SECONDS)

    def start(self) -> None:
        """Make ready for chats before the first one comes."""
        if self._template is not None:
            self._templates.start()

    def close(self) -> None:
        for lane in (self._rendering, *(lane for lane, _ in self._lanes.values())):
            lane.close()
        self._templates.close()

    async def of_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text with the tokenizer's special tokens. Raises ApiError."""
        return await self._encoded("prompt", text, special=True)

    async def of_chat(
        self, messages: list[dict[str, str]], names: dict[str, Any]
    ) -> tuple[int, ...]:
        """Return the ids of a conversation up to the beginning of the next answer. `names` are what
        the chat template can read besides. Raises ApiError."""
        template = self._template
        if template is None:
            raise errors.ApiError(
                400,
                "This model's tokenizer has no chat template. Use /v1/completions, or start the"
                " server with --chat-template FILE.",
                code="no_chat_template",
            )
        if reserved := sorted(RESERVED & set(names)):
            message = f"the server sets {reserved[0]!r}"
            raise errors.invalid("chat_template_kwargs", message)
        _check_names(names)
        self._check_length(sum(len(message["content"]) for message in messages))
        for message in messages:
            _check_unicode("messages", message["content"])

        def render() -> str:
            said, given = messages, names
            if not self._trusted:
                said = templates.marked(self._tokenizer, template, messages)
                given = templates.marked_names(self._tokenizer, template, names)
            return self._templates.render(template, said, self._names | given, self._longest)

        text = await self._rendering.run("messages", render)
        return await self._encoded("messages", text, special=False)

    async def texts(self, ids: tuple[int, ...], *, by_token: bool) -> tuple[str, ...]:
        """Return the text of a prompt, whole or by token. Raises ApiError."""
        lane, tokenizer = self._lanes[len(ids) <= SHORT_TOKENS]
        return await lane.run(
            "prompt",
            lambda: text_by_token(tokenizer, ids) if by_token else (decoded(tokenizer, ids),),
        )

    async def _encoded(self, name: str, text: str, *, special: bool) -> tuple[int, ...]:
        self._check_length(len(text))
        _check_unicode(name, text)
        lane, tokenizer = self._lanes[len(text) <= SHORT]

        def encode() -> tuple[int, ...]:
            if special:
                return tuple(tokenizer(text, verbose=False).input_ids)
            return tuple(templates.encoded(tokenizer, text))

        return await lane.run(name, encode)

    def _check_length(self, characters: int) -> None:
        if characters > self._longest:
            raise errors.ApiError(
                400,
                f"This model's maximum context length is {self._capacity} tokens. However, your"
                f" prompt has {characters} characters, and at most {self._longest} can fit.",
                code="context_length_exceeded",
            )


def _check_names(names: dict[str, Any]) -> None:
    """Raise ApiError if what the template may read besides the messages is large: there is no limit
    of tokens for it."""
    values, depth, level = 0, 0, [names]
    problem = ""
    while level and not problem:
        values, depth = values + sum(map(len, level)), depth + 1
        if depth > MAX_NAMES_DEPTH:
            problem = "it is nested too deeply"
        elif values > MAX_NAMES_VALUES:
            problem = f"it has more than {MAX_NAMES_VALUES} values"
        else:
            parts = (outer.values() if isinstance(outer, dict) else outer for outer in level)
            level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
    if not problem:
        try:
            if len(json.dumps(names, allow_nan=False)) > MAX_NAMES_LENGTH:
                problem = f"it has more than {MAX_NAMES_LENGTH} characters of JSON"
        except ValueError:  # of 1e999
            problem = "a number in it is not finite"
    if problem:
        raise errors.invalid("chat_template_kwargs", problem)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "the text has half a surrogate pair, which is no Unicode text"
        raise errors.invalid(name, message) from None
