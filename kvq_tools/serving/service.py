"""From request fields to answers: prompts become requests, requests become jobs of the worker, and
pieces come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request as HttpRequest

from kvq_models.inference.engine.requests import CapacityError, QueueFullError, Request
from kvq_models.inference.sampling import Sampling
from kvq_tools.serving import errors
from kvq_tools.serving.answer import Answer, AnswerPiece
from kvq_tools.serving.bodies import MAX_BODY, Limits
from kvq_tools.serving.fields import COMPLETION_TOKENS, ChatFields, CompletionFields
from kvq_tools.serving.metrics import Metrics
from kvq_tools.serving.prompts import PromptEncoder
from kvq_tools.serving.text import TokenTexts
from kvq_tools.serving.wire import Usage
from kvq_tools.serving.worker import AcceptedAnswer, Stopping, Worker

MIN_BODY = 1 << 20
BODY_PER_TOKEN = 1 << 10
MAX_ENTRIES = 1 << 20  # log-probabilities of a whole answer, some 100 bytes each


def largest_body(capacity: int) -> int:
    """Return how many bytes a request to slots of this many tokens may have by default.

    Parsing JSON holds the interpreter's lock: 8 MiB of short lists stop all answers for a second.
    A request may have many prompts, so a token of the capacity stands for more than its own bytes.
    """
    return min(max(MIN_BODY, BODY_PER_TOKEN * capacity), MAX_BODY)


class Service:
    """A model that answers.

    Args:
        name: the model's name for clients.
        chat_template: in place of the tokenizer's.
        limits: of one request.
        trusted: messages may spell special tokens.
        defaults: the sampling of requests that ask for none.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: Any,
        name: str,
        metrics: Metrics,
        *,
        chat_template: str | None = None,
        limits: Limits = Limits(),
        trusted: bool = False,
        defaults: Sampling = Sampling(),
    ):
        self.worker = worker
        self.tokenizer = tokenizer
        self.name = name
        self.metrics = metrics
        self.limits = limits
        self.defaults = defaults
        self.prompts = PromptEncoder(
            tokenizer, chat_template, capacity=self.capacity, trusted=trusted
        )
        self.texts = TokenTexts(tokenizer)
        self._end_ids = tuple(worker.engine.llama.config.eos_token_ids)
        self._special = {
            str(token): number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }

    @property
    def capacity(self) -> int:
        return self.worker.engine.capacity

    @property
    def max_choices(self) -> int:
        """The number of choices that slots and queue hold."""
        return self.worker.engine.slots + self.worker.engine.queue_limit

    async def completion(self, fields: CompletionFields, owner: str = "") -> Pending:
        """Turn the fields into requests, one for each prompt and choice. Raises ApiError.

        owner: prompts of another owner share no prefixes.
        """
        asked = fields.prompts
        if not asked or not all(asked):
            raise errors.invalid("prompt", "a prompt is empty; give at least one character")
        prompts = [
            await self.prompts.of_text(prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in asked
        ]
        alternatives = fields.logprobs or 0
        limit = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
        scored = bool(fields.echo) and fields.logprobs is not None
        requests = [
            request
            for prompt in prompts
            for request in self._requests(
                prompt, fields, limit, owner, alternatives=alternatives, scored=scored
            )
        ]
        self._check(requests, fields)  # what is refused costs nothing more
        texts = [
            await self.prompts.texts(prompt, by_token=scored) if fields.echo else None
            for prompt in prompts
        ]
        return self._pending(requests, prompts, fields, texts)

    async def chat(self, fields: ChatFields, owner: str = "") -> Pending:
        """Turn the fields into requests, one for each choice. Raises ApiError."""
        prompt = await self.prompts.of_chat(
            [message.plain for message in fields.messages], fields.chat_template_kwargs or {}
        )
        room = self.capacity - len(prompt)
        if room < 1:
            raise errors.of_refusal(CapacityError(len(prompt), 1, self.capacity))
        limit = room if fields.limit is None else fields.limit
        requests = self._requests(
            prompt, fields, limit, owner, alternatives=fields.top_logprobs or 0
        )
        self._check(requests, fields)
        return self._pending(requests, [prompt], fields, [None])

    def _requests(
        self,
        prompt: tuple[int, ...],
        fields: CompletionFields | ChatFields,
        limit: int,
        owner: str,
        *,
        alternatives: int,
        scored: bool = False,
    ) -> list[Request]:
        seed = secrets.randbits(32) if fields.seed is None else fields.seed % (1 << 32)
        # a special token is not a text, so it is never seen there
        stops = [self._special[stop] for stop in fields.stops if stop in self._special]
        request = Request(
            prompt,
            limit,
            fields.sampling(self.defaults),
            seed,
            end_ids=(*self._end_ids, *stops),
            alternatives=alternatives,
            logprobs=fields.logprobs is not None and fields.logprobs is not False,
            prompt_logprobs=scored,
            frequency_penalty=float(fields.frequency_penalty or 0),
            presence_penalty=float(fields.presence_penalty or 0),
            bias=fields.bias,
            owner=owner,
        )
        return [dataclasses.replace(request, choice=choice) for choice in range(fields.n or 1)]

    def _pending(
        self,
        requests: list[Request],
        prompts: Sequence[tuple[int, ...]],
        fields: CompletionFields | ChatFields,
        texts: Sequence[tuple[str, ...] | None],
    ) -> Pending:
        """Submit checked requests. texts: of each prompt, if it is sent back."""
        pending = Pending(self, Usage(sum(map(len, prompts))), len(requests), fields.n or 1)
        # Whoever scores a prompt cuts the drawn token off the end of the list. In a chat the tokens
        # spell the message.
        of_text = isinstance(fields, CompletionFields)
        stops = {self._special.get(stop) for stop in fields.stops}  # of which nothing is sent
        shown_ends = set(self._end_ids) - stops if of_text else ()
        choices = fields.n or 1
        answers = [
            Answer(
                i,
                request,
                self.tokenizer,
                fields.stops,
                texts[i // choices],
                pending.send,
                shown_ends,
            )
            for i, request in enumerate(requests)
        ]
        try:
            pending.jobs = self.worker.submit(answers)
        except (QueueFullError, Stopping) as error:
            raise errors.of_refusal(error) from None
        return pending

    def _check(self, requests: Sequence[Request], fields: CompletionFields | ChatFields) -> None:
        try:
            self.worker.check(requests)
        except ValueError as error:
            raise errors.of_refusal(error) from None
        entries = sum(map(_entries, requests))
        if entries > MAX_ENTRIES and not fields.stream:
            message = (
                f"the answer may have {entries} log-probabilities, and this server sends up to"
                f" {MAX_ENTRIES} at a time: set a smaller 'max_tokens', or 'stream'"
            )
            raise errors.invalid("logprobs", message)


def _entries(request: Request) -> int:
    """Return how many log-probabilities an answer reports at most."""
    tokens = request.logprobs * request.max_new_tokens
    tokens += request.prompt_logprobs * len(request.prompt)
    return tokens * (1 + request.alternatives)


class Pending:
    """Accepted choices, `of_prompt` of each prompt. Pieces of all of them come in the order in
    which they were generated."""

    def __init__(self, service: Service, usage: Usage, choices: int, of_prompt: int):
        self.usage, self.choices, self.jobs = usage, choices, list[AcceptedAnswer]()
        self._of_prompt = of_prompt
        self._service, self._left = service, choices
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[AnswerPiece | None] = asyncio.Queue()

    def send(self, piece: AnswerPiece) -> None:
        """Pass on a piece from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self, http: HttpRequest) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces until every choice has ended or the client leaves, which frees its slots.
        Raises ApiError if a choice fails."""
        gone = asyncio.create_task(self._watch(http))
        try:
            while self._left:
                piece = await self._pieces.get()
                if piece is None:
                    return
                if piece.finish == "failed":
                    raise errors.ApiError(
                        500, f"The server had an error: {piece.failure}.", kind="server_error"
                    )
                if piece.finish:
                    self.usage.drawn += piece.drawn
                    if piece.index % self._of_prompt == 0:
                        self.usage.stored += piece.stored
                    self._left -= 1
                yield piece
        finally:
            gone.cancel()
            self.leave()

    def leave(self) -> None:
        """Free the slots of choices that have not ended."""
        if self._left:
            self._service.worker.cancel(self.jobs)

    async def _watch(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._pieces.put_nowait(None)
