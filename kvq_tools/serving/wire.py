"""Answers in OpenAI's types: whole ones, and chunks of a stream."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

from kvq_tools.serving.answer import AnswerPiece, TokenInText
from kvq_tools.serving.text import token_bytes, token_text


@dataclasses.dataclass
class Usage:
    """Token counts of a response: each prompt once, the drawn tokens of every choice, and the
    prompt tokens that came from the store of prefixes for the first choice of each prompt."""

    prompt: int
    drawn: int = 0
    stored: int = 0

    def counted(self) -> CompletionUsage:
        return CompletionUsage(
            prompt_tokens=self.prompt,
            completion_tokens=self.drawn,
            total_tokens=self.prompt + self.drawn,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.stored),
        )


class _Wire:
    """One response, whole or in chunks. `prefix` begins its id."""

    def __init__(self, prefix: str, model: str, tokenizer: Any):
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self.model, self._tokenizer = model, tokenizer

    def _response(
        self, kind: type[BaseModel], name: str, choices: Sequence[BaseModel], **more: Any
    ) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return kind.construct(**head, choices=choices, **more).model_dump(exclude_unset=True)


class CompletionWire(_Wire):
    """Responses of /v1/completions. alternatives: None without log-probabilities."""

    def __init__(self, model: str, tokenizer: Any, alternatives: int | None):
        super().__init__("cmpl", model, tokenizer)
        self._alternatives = alternatives

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        return self._completion([self._choice(piece.index, [piece])])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._completion([], usage=usage.counted())

    def whole(self, choices: list[list[AnswerPiece]], usage: Usage) -> dict[str, Any]:
        made = [self._choice(i, pieces) for i, pieces in enumerate(choices)]
        return self._completion(made, usage=usage.counted())

    def _choice(self, index: int, pieces: list[AnswerPiece]) -> CompletionChoice:
        tokens = [token for piece in pieces for token in piece.tokens]
        # a chunk may have no tokens, or no finish reason yet
        shown = self._alternatives is not None and tokens
        return CompletionChoice.construct(
            index=index,
            text="".join(piece.text for piece in pieces),
            logprobs=self._logprobs(tokens) if shown else None,
            finish_reason=pieces[-1].finish,
        )

    def _logprobs(self, tokens: list[TokenInText]) -> Logprobs:
        def likely(token: TokenInText) -> dict[str, float] | None:
            if token.logprob is None:
                return None
            # two tokens may have the same text; the more probable one is reported
            return {
                token_text(self._tokenizer, other): logprob
                for other, logprob in reversed(token.likely)
            }

        return Logprobs.construct(
            tokens=[token_text(self._tokenizer, token.token) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[likely(token) for token in tokens] if self._alternatives else None,
            text_offset=[token.offset for token in tokens],
        )

    def _completion(self, choices: list[CompletionChoice], **more: Any) -> dict[str, Any]:
        return self._response(Completion, "text_completion", choices, **more)


class ChatWire(_Wire):
    """Responses of /v1/chat/completions."""

    def __init__(self, model: str, tokenizer: Any, logprobs: bool):
        super().__init__("chatcmpl", model, tokenizer)
        self._logprobs = logprobs

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = ChoiceDelta(role="assistant", content="")
        return [self._chunk([ChunkChoice(index=index, delta=delta, finish_reason=None)])]

    def chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        delta = ChoiceDelta(content=piece.text) if piece.text or piece.tokens else ChoiceDelta()
        shown = self._logprobs and piece.tokens
        logprobs = ChunkLogprobs(content=self._content(list(piece.tokens))) if shown else None
        choice = ChunkChoice.construct(
            index=piece.index, delta=delta, logprobs=logprobs, finish_reason=piece.finish
        )
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([], usage=usage.counted())

    def whole(self, choices: list[list[AnswerPiece]], usage: Usage) -> dict[str, Any]:
        finished = []
        for index, pieces in enumerate(choices):
            message = ChatCompletionMessage(
                role="assistant", content="".join(piece.text for piece in pieces), refusal=None
            )
            tokens = [token for piece in pieces for token in piece.tokens]
            logprobs = (
                ChoiceLogprobs(content=self._content(tokens), refusal=None)
                if self._logprobs
                else None
            )
            finished.append(
                Choice.construct(
                    index=index, message=message, logprobs=logprobs, finish_reason=pieces[-1].finish
                )
            )
        return self._response(ChatCompletion, "chat.completion", finished, usage=usage.counted())

    def _content(self, tokens: list[TokenInText]) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                **self._named(token.token, token.logprob or 0.0),
                top_logprobs=[TopLogprob(**self._named(*other)) for other in token.likely],
            )
            for token in tokens
        ]

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        encoded = token_bytes(self._tokenizer, token)
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": logprob,
            "bytes": None if encoded is None else list(encoded),
        }

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> dict[str, Any]:
        return self._response(ChatCompletionChunk, "chat.completion.chunk", choices, **more)
